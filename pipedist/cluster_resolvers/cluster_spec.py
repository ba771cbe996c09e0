"""The tasks of a cluster: jobs, each with numbered tasks at addresses (tf.train.ClusterSpec)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ClusterSpec:
    """A cluster's tasks; immutable.

    Args:
        cluster: job name -> addresses, `host:port`; or -> {task index: address}, where some are missing.
            Another ClusterSpec is copied. The order of jobs is kept.

    Raises:
        TypeError: it is no mapping, a job's tasks are neither a list nor a mapping, or an address is
            no text.
        ValueError: a task index is no int of at least 0.
    """

    __slots__ = ("_jobs",)

    def __init__(
        self, cluster: Mapping[str, Sequence[str] | Mapping[int, str] | Mapping[str, str]] | ClusterSpec
    ) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = cluster._jobs
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"a cluster is {cluster!r} of type {type(cluster).__name__}; expected a mapping from job "
                "names to lists of addresses"
            )
        self._jobs = {_name(job): _tasks(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return job -> list of addresses; -> {index: address} where some are missing, or all."""
        return {
            job: list(tasks.values()) if tasks and list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has.

        Raises:
            ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a job's tasks, in ascending order.

        Raises:
            ValueError: there is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return a task's address.

        Raises:
            ValueError: there is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"job {job_name!r} has no task {task_index!r}: its tasks are {_told(list(tasks))}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job's tasks; None for a number below the last that is missing.

        Raises:
            ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"the cluster has no job {name!r}: its jobs are {_told(list(self._jobs))}")
        return self._jobs[name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(tuple((job, tuple(tasks.items())) for job, tasks in sorted(self._jobs.items())))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _name(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"a job's name is {job!r}; expected text")
    return job


def _tasks(job: object, tasks: object) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        numbered = {_index(job, index): address for index, address in tasks.items()}
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        numbered = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"the tasks of job {job!r} are {tasks!r}; expected a list of addresses, or a mapping from "
            "task numbers to addresses"
        )
    for index, address in numbered.items():
        if not isinstance(address, str):
            raise TypeError(f"the address of task {index} of job {job!r} is {address!r}; expected text")
    return dict(sorted(numbered.items()))


def _index(job: object, index: object) -> int:
    text = index if isinstance(index, str) else "" if isinstance(index, bool) else str(index)
    if not isinstance(index, int | str) or not text.isdecimal():
        raise ValueError(f"a task index of job {job!r} is {index!r}; expected an int >= 0")
    return int(text)


def _told(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"
