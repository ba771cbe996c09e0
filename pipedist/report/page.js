"use strict";
// Draws a report from the JSON in the page. All text is set as text, never as HTML.

const NS = "http://www.w3.org/2000/svg";
const ENDS = ["returned", "failed", "timed out", "lost with its worker", "cancelled"];
let data = JSON.parse(document.getElementById("data").textContent);
const ROWS_MAX = 8;
const view = { process: -1, from: 0, to: 1, open: new Map() };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (index) => css(`--c${index % 8}`);
const endColor = (end) => [null, css("--bad"), css("--bad"), css("--lost"), css("--dim")][end];

function el(name, fields = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(fields)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}

function svg(name, fields = {}, ...children) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(fields)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// -- text ------------------------------------------------------------------------------

const count = (value) => Math.round(value).toLocaleString("en-US");
function seconds(value) {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
  return value > 0 ? `${(value * 1e6).toPrecision(3)} µs` : "0 s";
}
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
function short(value) {
  if (value === null) return "no number";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(5));
}
const rate = (value) => (value >= 100 ? count(value) : String(+value.toPrecision(3)));

function section(title, ...children) {
  const kept = children.filter((each) => each);
  return kept.length ? el("section", {}, el("h2", {}, title), ...kept) : null;
}

function table(heads, rows) {
  const cell = (kind, value, index) =>
    el(kind, heads[index][1] ? { class: "number" } : {}, ...(value instanceof Node ? [value] : [String(value ?? "")]));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((head, index) => cell("th", head[0], index)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, index) => cell("td", value, index)))))));
}

function folded(title, isOpen, make) {
  const node = el("details", {}, el("summary", {}, title));
  if (view.open.get(title) ?? isOpen) node.open = true;
  node.addEventListener("toggle", () => view.open.set(title, node.open));
  node.append(make());
  return node;
}

// -- head ------------------------------------------------------------------------------

function drawHead() {
  const title = document.getElementById("title");
  document.title = `${data.name}: ${data.state}`;
  title.replaceChildren(data.name, el("span", { class: `state ${data.state}` }, data.state));
  const last = data.processes.at(-1);
  const began = last ? new Date(data.processes[0].began_at * 1000).toLocaleString() : "";
  const times = data.processes.length > 1 ? `, executed by ${data.processes.length} processes` : "";
  document.getElementById("subtitle").textContent =
    `run ${data.run} in ${data.folder}${began ? `, began ${began}` : ""}${times}`;
}

function overview() {
  const total = (name) => data.processes.flatMap((each) => each.stages).reduce((sum, stage) => sum + stage[name], 0);
  const ledger = data.ledger;
  const tiles = [];
  const tile = (value, name, kind = "", title = "") => tiles.push(el("div", { class: "tile", title }, el("b", { class: kind }, value), el("span", {}, name)));
  if (data.processes.length) tile(seconds(data.processes.reduce((sum, each) => sum + each.seconds, 0)), "time");
  if (ledger) {
    tile(count(ledger.committed), `of ${count(ledger.elements)} elements committed`, ledger.committed === ledger.elements ? "good" : "");
    tile(count(ledger.quarantined), "quarantined", ledger.quarantined ? "warn" : "");
    tile(count(ledger.lost), "lost", ledger.lost ? "bad" : "");
  }
  if (data.processes.length) {
    tile(count(total("calls")), "calls");
    tile(count(data.processes.at(-1).workers.length), "workers");
    tile(count(total("failed")), "failed attempts", total("failed") ? "warn" : "", "Calls that raised or exceeded their time limit, also for the last time.");
    if (total("retries")) tile(count(total("retries")), "retries", "warn", "Attempts that did not count: after an error, a timeout or the death of a worker, and of slow calls.");
    tile(bytes(total("bytes_in") + total("bytes_out")), "sent and received");
  }
  const limit = data.processes.at(-1)?.limit;
  return section("Summary",
    data.failure ? el("pre", { class: "bad" }, data.failure) : null,
    ...resumed(),
    el("div", { class: "tiles" }, ...tiles),
    limit && data.state !== "running" ? el("p", { class: "limit" }, limit) : null);
}

function resumed() {
  const command = data.about.command;
  if (!command || data.has_advice || !["failed", "interrupted"].includes(data.state)) return [];
  return [el("p", {}, data.state === "failed" ? "After a fix, continue the run:" : "Continue the run:"), el("pre", {}, `${command} --resume`)];
}

function waits() {
  const status = data.status;
  if (!status || !status.waits) return null;
  const rows = status.waits.slice(0, 100).map((wait) => [
    wait.stages ?? "", wait.step ?? "", wait.replica ?? "", wait.worker ?? "",
    wait.reason, wait.for_s === null ? "" : seconds(wait.for_s), wait.text]);
  const done = status.passes.map((each) => `${each.stages}: ${count(each.steps_done)} of ${each.steps_total === null ? "?" : count(each.steps_total)} steps`);
  return section("Now",
    el("p", {}, `Phase ${status.phase} of ${status.phases}; workers: ${status.workers.ready} ready, ${status.workers.busy} busy. ${done.join("; ")}`),
    rows.length ? table([["stages"], ["step", 1], ["replica", 1], ["worker"], ["reason"], ["for", 1], ["detail"]], rows) : null);
}

// -- plan ------------------------------------------------------------------------------

function plan() {
  if (!data.picture) return null;
  const drawn = new DOMParser().parseFromString(data.picture, "image/svg+xml").documentElement;
  return section("Plan", el("div", { class: "plan" }, document.importNode(drawn, true)));
}

function legend(entries) {
  return el("div", { class: "legend" }, ...entries.map(([fill, name]) => {
    const mark = el("i");
    mark.style.background = fill;
    return el("span", {}, mark, name);
  }));
}

// -- stages and workers ------------------------------------------------------------------

function stages(process) {
  const rows = process.stages.map((stage) => [
    stage.name, count(stage.calls), count(stage.elements), rate(stage.elements_per_s), seconds(stage.busy_s),
    seconds(stage.reading_s), seconds(stage.p50_s), seconds(stage.p95_s), seconds(stage.max_s),
    stage.slowest ? el("code", {}, `${stage.slowest} on ${stage.slowest_worker}`) : "", count(stage.failed), count(stage.retries), count(stage.trials),
    bytes(stage.bytes_in), bytes(stage.bytes_out)]);
  const parts = process.stages.filter((stage) => Object.keys(stage.stages_s).length > 1).map((stage) =>
    el("p", { class: "dim" }, `Busy time of ${stage.name}: ${Object.entries(stage.stages_s).map(([name, spent]) => `${name} ${seconds(spent)}`).join(", ")}`));
  if (!rows.length) return null;
  return section("Stages", table([["stages"], ["calls", 1], ["elements", 1], ["elements/s", 1], ["busy", 1], ["reading", 1],
    ["median call", 1], ["95 percent", 1], ["longest", 1], ["longest call"], ["failed", 1], ["retries", 1], ["trials", 1], ["in", 1], ["out", 1]], rows), ...parts);
}

function workers(process) {
  const rows = process.workers.map((worker) => [
    worker.name, count(worker.calls), seconds(worker.busy_s), `${Math.min(100, Math.round(100 * worker.busy_s / Math.max(process.seconds, 1e-9)))}%`,
    seconds(worker.reading_s), seconds(worker.input_wait_s), seconds(worker.stage_wait_s), seconds(worker.driver_wait_s),
    worker.memory_bytes ? bytes(worker.memory_bytes) : "", bytes(worker.bytes_in), bytes(worker.bytes_out)]);
  rows.push(["driver", "", seconds(process.driver_busy_s), `${Math.min(100, Math.round(100 * process.driver_busy_s / Math.max(process.seconds, 1e-9)))}%`, "", "", "", "", bytes(process.driver_memory_bytes), "", ""]);
  return section("Workers", table([["worker"], ["calls", 1], ["busy", 1], ["of the time", 1], ["reading", 1], ["waited for input", 1], ["for other stages", 1],
    ["for the driver", 1], ["memory, at most", 1], ["in", 1], ["out", 1]], rows));
}

// -- timeline --------------------------------------------------------------------------

function unpacked(process) {
  if (process.columns) return process.columns;
  const types = { pass: Uint16Array, worker: Uint16Array, outcome: Uint8Array, attempt: Uint8Array, merged: Uint32Array };
  const found = { count: process.spans.count };
  for (const [name, text] of Object.entries(process.spans)) {
    if (name === "count") continue;
    const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    found[name] = new (types[name] ?? Float64Array)(raw.buffer);
  }
  const order = Array.from(found.started.keys()).sort((a, b) => found.started[a] - found.started[b]);
  const ends = process.worker_names.map(() => []);  // of each row of a lane: calls that wait overlap
  found.row = new Uint8Array(found.count);
  for (const i of order) {
    const rows = ends[found.worker[i]];
    let row = rows.findIndex((end) => end <= found.started[i]);
    if (row < 0) row = rows.length < ROWS_MAX ? rows.length : rows.indexOf(Math.min(...rows));
    found.row[i] = row;
    rows[row] = found.finished[i];
  }
  found.rows = ends.map((rows) => Math.max(1, rows.length));
  process.columns = found;
  return found;
}

function timeline(process) {
  const spans = unpacked(process);
  if (!spans.count) return null;
  const names = process.worker_names;
  const most = Math.max(...spans.rows);
  const lane = names.length > 40 ? 8 : names.length > 12 ? 14 : Math.max(22, Math.min(60, most * 7));
  const left = 64, bottom = 22;
  const canvas = el("canvas", { role: "img", "aria-label": "one lane for each worker, with its calls over time" });
  const height = names.length * lane + bottom + 12;
  canvas.style.height = `${height}px`;
  const total = process.seconds;
  let width = 0, frame = 0;
  const xOf = (s) => left + (s / total - view.from) / (view.to - view.from) * (width - left - 8);
  const atOf = (x) => ((x - left) / (width - left - 8) * (view.to - view.from) + view.from) * total;

  function draw() {
    frame = 0;
    width = canvas.clientWidth;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const dim = css("--dim"), line = css("--line");
    names.forEach((name, place) => {
      if (place % 2 === 0) { pen.fillStyle = css("--page"); pen.fillRect(left, place * lane, width - left - 8, lane); }
      if (lane >= 14 || place % 4 === 0) { pen.fillStyle = dim; pen.fillText(name.slice(0, 9), 2, place * lane + lane / 2); }
    });
    const colors = [0, 1, 2, 3, 4, 5, 6, 7].map(color);
    const ends = ENDS.map((_, end) => endColor(end));
    pen.save();
    pen.beginPath(); pen.rect(left, 0, width - left - 8, height); pen.clip();
    const t0 = view.from * total * 1e6, t1 = view.to * total * 1e6;
    for (const late of [false, true]) {  // failures above the others
      for (let i = 0; i < spans.count; i += 1) {
        const end = spans.outcome[i];
        if ((end > 0) !== late || spans.finished[i] < t0 || spans.started[i] > t1) continue;
        const a = xOf(spans.started[i] / 1e6), b = Math.max(a + (late ? 2 : 0.8), xOf(spans.finished[i] / 1e6));
        pen.fillStyle = end ? ends[end] : colors[spans.pass[i] % 8];
        pen.globalAlpha = end ? 1 : 0.85;
        const size = (lane - 4) / spans.rows[spans.worker[i]];
        pen.fillRect(a, spans.worker[i] * lane + 2 + spans.row[i] * size, b - a - (b - a > 4 ? 0.6 : 0), Math.max(1, size - (size > 4 ? 0.6 : 0)));
      }
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = css("--bad");
    for (const [at] of process.marks) {
      const x = xOf(at);
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, names.length * lane); pen.setLineDash([2, 3]); pen.stroke();
    }
    pen.setLineDash([]);
    pen.restore();
    pen.strokeStyle = line; pen.fillStyle = dim; pen.textAlign = "center";
    const span = (view.to - view.from) * total;
    const step = [1, 2, 5, 10].map((each) => each * 10 ** Math.floor(Math.log10(span / (width / 110)))).find((each) => span / each <= width / 80);
    for (let at = Math.ceil(view.from * total / step) * step; at <= view.to * total + step * 1e-6; at += step) {
      const x = xOf(at);
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, names.length * lane + 4); pen.globalAlpha = 0.6; pen.stroke(); pen.globalAlpha = 1;
      pen.fillText(step < 1 ? `${+(at * 1000).toPrecision(6)} ms` : `${+at.toPrecision(6)} s`, Math.min(Math.max(x, left + 14), width - 22), names.length * lane + 14);
    }
    pen.textAlign = "left";
  }
  const redraw = () => { if (!frame) frame = requestAnimationFrame(draw); };
  function zoom(factor, around) {
    const size = Math.min(1, Math.max(1e-6, (view.to - view.from) * factor));
    const share = (around - view.from) / (view.to - view.from);
    view.from = Math.min(Math.max(0, around - size * share), 1 - size);
    view.to = view.from + size;
    redraw();
  }
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;  // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, atOf(event.offsetX) / total);
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, from: view.from, to: view.to }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, atOf(event.offsetX) / total));
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const size = drag.to - drag.from;
      const shift = (drag.x - event.offsetX) / (width - left - 8) * size;
      view.from = Math.min(Math.max(0, drag.from + shift), 1 - size); view.to = view.from + size;
      redraw();
      return;
    }
    tip(event, found(event.offsetX, event.offsetY));
  });
  canvas.addEventListener("pointerleave", () => tip(null, ""));
  function found(x, y) {
    const at = atOf(x) * 1e6, near = Math.abs(atOf(x + 3) - atOf(x)) * 1e6, worker = Math.floor(y / lane);
    const row = Math.floor((y - worker * lane - 2) / ((lane - 4) / spans.rows[worker]));
    let best = -1;
    for (let i = 0; i < spans.count; i += 1) {
      if (spans.worker[i] !== worker || spans.row[i] !== row || spans.started[i] - near > at || spans.finished[i] + near < at) continue;
      if (best < 0 || spans.outcome[i] > spans.outcome[best] || spans.started[i] > spans.started[best]) best = i;
    }
    const marks = process.marks.filter(([when]) => Math.abs(xOf(when) - x) < 3).map(([when, text]) => `${seconds(when)}: ${text}`);
    if (best < 0) return marks.slice(0, 6).join("\n");
    const pass = process.passes[spans.pass[best]], first = spans.lo[best];
    const lines = [`${pass.name} on ${names[worker]}`,
      `${count(spans.calls[best])} call${spans.calls[best] === 1 ? "" : "s"} from step ${Math.floor(first / process.replicas)}, replica ${first % process.replicas}`,
      `${ENDS[spans.outcome[best]]}${spans.attempt[best] ? `, attempt ${spans.attempt[best] + 1}` : ""}`,
      `${seconds(spans.started[best] / 1e6)} to ${seconds(spans.finished[best] / 1e6)}, ${seconds((spans.finished[best] - spans.started[best]) / 1e6)}`,
      `queued ${seconds((spans.sent[best] - spans.queued[best]) / 1e6)} before it was sent`];
    if (spans.merged[best] > 1) lines.push(`${spans.merged[best]} ranges drawn as one`);
    return [...lines, ...marks.slice(0, 3)].join("\n");
  }
  new ResizeObserver(redraw).observe(canvas);
  view.redraw = redraw;
  const tools = el("div", { class: "tools" },
    el("button", { onclick: () => zoom(0.5, (view.from + view.to) / 2), title: "zoom in" }, "+"),
    el("button", { onclick: () => zoom(2, (view.from + view.to) / 2), title: "zoom out" }, "−"),
    el("button", { onclick: () => { view.from = 0; view.to = 1; redraw(); } }, "all"),
    "Drag to move, Ctrl + wheel or double-click to zoom.");
  const kinds = process.passes.map((pass, index) => [color(index), pass.name]).slice(0, 8);
  const present = new Set(spans.outcome);
  ENDS.forEach((name, end) => { if (end && present.has(end)) kinds.push([endColor(end), name]); });
  if (process.marks.length) kinds.push([css("--bad"), "dashed: a death or a retry"]);
  return section("Timeline", tools, canvas, legend(kinds));
}

function tip(event, text) {
  const node = document.getElementById("tip");
  node.hidden = !text;
  if (!text) return;
  node.textContent = text;
  node.style.left = `${Math.min(event.clientX + 14, window.innerWidth - node.offsetWidth - 8)}px`;
  node.style.top = `${Math.min(event.clientY + 14, window.innerHeight - node.offsetHeight - 8)}px`;
}

// -- charts ----------------------------------------------------------------------------

function chart(title, lines, { from = 0, to, xText, yText = short, zero = false, steps = false }) {
  const width = Math.min(560, window.innerWidth - 50), height = 190, left = 58, right = 12, top = 10, bottom = 24;
  const values = lines.flatMap((line) => line.points.map((point) => point[1])).filter((value) => value !== null);
  if (!values.length) return null;
  let low = zero ? 0 : Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= zero ? 0 : 1; high += 1; }
  const x = (value) => left + (value - from) / (to - from || 1) * (width - left - right);
  const y = (value) => height - bottom - (value - low) / (high - low) * (height - top - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const share of [0, 0.5, 1]) {
    const value = low + (high - low) * share;
    picture.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: css("--line") }));
    const label = svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "dim" });
    label.textContent = yText(value);
    picture.append(label);
    const at = from + (to - from) * share;
    const below = svg("text", { x: x(at), y: height - 6, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle", class: "dim" });
    below.textContent = xText(at);
    picture.append(below);
  }
  lines.forEach((line, index) => {
    let path = "", last = null;
    for (const [at, value] of line.points) {
      if (value === null) { last = null; continue; }
      path += last === null ? `M${x(at).toFixed(1)} ${y(value).toFixed(1)}` : steps ? `H${x(at).toFixed(1)}V${y(value).toFixed(1)}` : `L${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      last = value;
    }
    if (steps && last !== null) path += `H${x(to).toFixed(1)}`;
    picture.append(svg("path", { d: path, fill: "none", stroke: color(line.color ?? index), "stroke-width": 1.7 }));
  });
  const names = lines.map((line, index) => [color(line.color ?? index), line.name]).filter(([, name]) => name);
  return el("div", {}, el("h3", {}, title), picture, names.length > 1 ? legend(names) : null);
}

function overTime(process) {
  const total = process.seconds;
  const calls = process.throughput.map((values, index) => ({
    name: process.passes[index].name, color: index, points: values.map((value, place) => [(place + 0.5) * total / values.length, value]) }))
    .filter((line) => line.points.some((point) => point[1]));
  const memory = process.worker_names.map((name, number) => ({
    name, points: process.memory.filter((each) => each[1] === number).map(([at, , size]) => [at, size]) })).filter((line) => line.points.length).slice(0, 16);
  const charts = [
    chart("Calls per second", calls, { to: total, xText: seconds, yText: rate, zero: true }),
    memory.length ? chart("Memory of the workers, largest so far", memory, { to: total, xText: seconds, yText: bytes, zero: true, steps: true }) : null,
  ].filter(Boolean);
  return charts.length ? section("Over time", el("div", { class: "charts" }, ...charts)) : null;
}

function curves() {
  const charts = data.curves.flatMap((curve) => curve.lines.map((line) => {
    const points = line.values.map((value, index) => [index * line.every + 1, value]);
    const name = line.name ? `${curve.stage}: ${line.name}` : curve.stage;
    return chart(`${name}, per ${curve.per}`, [{ name, points }], { from: 1, to: Math.max(2, points.at(-1)[0]), xText: count });
  })).filter(Boolean);
  return charts.length ? section("Values per step or epoch", el("div", { class: "charts" }, ...charts)) : null;
}

// -- outputs, quarantine, log, environment -----------------------------------------------

function bars(histogram) {
  const width = 420, height = 90, most = Math.max(...histogram.counts), step = width / histogram.counts.length;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height + 16}`, width, role: "img", "aria-label": "distribution of the values" });
  histogram.counts.forEach((value, index) => {
    const size = value / most * height;
    picture.append(svg("rect", { x: index * step + 0.5, y: height - size, width: step - 1, height: size, fill: color(0) }));
  });
  [[0, "start", histogram.low], [width, "end", histogram.high]].forEach(([x, anchor, value]) => {
    const label = svg("text", { x, y: height + 13, "text-anchor": anchor, class: "dim" });
    label.textContent = short(value);
    picture.append(label);
  });
  return picture;
}

function shownPreview(preview) {
  if (!preview) return null;
  if (preview.kind === "table") {
    const more = preview.count !== null && preview.count > preview.rows.length ? el("p", { class: "dim" }, `${count(preview.count)} rows in all`) : null;
    return el("div", {}, table(preview.names.map((name) => [name]), preview.rows), more);
  }
  if (preview.kind === "text") return el("pre", {}, preview.text);
  if (preview.kind === "members") return el("div", {}, ...preview.members.map((member) => el("div", {}, el("h3", {}, member.name), shownPreview(member))));
  return el("div", {}, el("p", { class: "mono" }, `${preview.dtype}[${preview.shape.join(", ")}]  ${preview.first.join(", ")}${preview.shape[0] > preview.first.length ? ", ..." : ""}`),
    preview.histogram ? bars(preview.histogram) : null);
}

function outputs() {
  if (!data.outputs.length) return null;
  return section("Outputs", ...data.outputs.map((output) => el("div", {},
    el("h3", {}, output.file, output.stage ? el("span", { class: "dim" }, `  of ${output.stage}`) : null),
    output.problem ? el("p", { class: "bad" }, output.problem)
      : el("p", { class: "dim mono" }, `${bytes(output.bytes)}, sha256 ${output.sha256}`),
    shownPreview(output.preview))));
}

function quarantine() {
  const found = data.quarantine;
  if (!found.count) return null;
  const more = found.count > found.rows.length ? ` (the first ${count(found.rows.length)} are shown)` : "";
  return section(`Quarantine: ${count(found.count)} element${found.count === 1 ? "" : "s"}${more}`,
    el("p", { class: "dim" }, "Execute one again: pipedist replay RUN --call CALL --element ELEMENT"), table([["element", 1], ["call"], ["cause"], ["input"]],
    found.rows.map((row) => [row.element, el("code", {}, row.call), row.cause, el("code", {}, row.input === "null" ? row.note : row.input)])));
}

const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];
const search = el("input", { type: "search", placeholder: "search", "aria-label": "search the log", oninput: () => showLog() });
const least = el("select", { "aria-label": "least level", onchange: () => showLog() },
  ...["every line", ...LEVELS].map((name, index) => el("option", { value: index - 1 }, index ? `${name} and above` : name)));
const logLines = el("pre", { id: "log" });  // kept, as a live page is drawn again and again

function showLog() {
  const wanted = search.value.toLowerCase(), level = Number(least.value), shown = [];
  for (const line of data.log.lines) {
    const name = line.split(" ", 2)[1];
    if (LEVELS.indexOf(name) < level || !line.toLowerCase().includes(wanted)) continue;
    shown.push(el("span", { class: `level-${name}` }, `${line}\n`));
  }
  logLines.replaceChildren(...shown);
}

function log() {
  if (!data.log.lines.length) return null;
  showLog();
  return section(data.log.is_cut ? "Log, the last lines" : "Log", el("div", { class: "tools" }, least, search), logLines);
}

function events(process) {
  if (!process.marks.length) return null;
  return section("Deaths and retries", table([["after", 1], ["event"]], process.marks.slice(-200).map(([at, text]) => [seconds(at), text])));
}

function about() {
  const found = data.about, rows = Object.entries(found.environment ?? {});
  return section("How to reproduce it",
    found.command ? el("pre", {}, found.command) : null,
    rows.length ? folded("Environment", true, () => table([["what"], ["value"]], rows)) : null,
    found.spec ? folded("Spec", false, () => el("pre", {}, found.spec)) : null);
}

// -- the page --------------------------------------------------------------------------

function draw() {
  drawHead();
  const number = view.process < 0 ? data.processes.length - 1 : Math.min(view.process, data.processes.length - 1);
  const process = data.processes[number];
  const choice = data.processes.length > 1 ? el("div", { class: "tools" }, "Measurements of process",
    ...data.processes.map((_, index) => el("button", { onclick: () => { view.process = index; view.from = 0; view.to = 1; draw(); }, ...(index === number ? { "aria-current": "true" } : {}) }, index === number ? `[${index + 1}]` : String(index + 1)))) : null;
  const parts = [overview(), waits(), plan(), choice, ...(process ? [stages(process), timeline(process), overTime(process), workers(process), events(process)] : []),
    curves(), quarantine(), outputs(), log(), about()];
  const focused = document.activeElement;
  document.getElementById("main").replaceChildren(...parts.filter(Boolean));
  if (focused === search || focused === least) focused.focus({ preventScroll: true });
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

const stream = document.body.dataset.stream;
if (stream) {
  const source = new EventSource(stream);
  source.onmessage = (event) => { data = JSON.parse(event.data); draw(); if (data.state !== "running") source.close(); };
}
