"""Words and pairs of words in lines of text."""

import re
from collections import Counter
from itertools import pairwise

WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def split(lines):
    """Return the words of each line, in lower case."""
    return [WORD.findall(line.lower()) for line in lines]


def words(lines):
    """Count the words of a shard."""
    return Counter(word for line in split(lines) for word in line)


def bigrams(lines):
    """Count the pairs of neighbouring words in a line."""
    return Counter(f"{a} {b}" for line in split(lines) for a, b in pairwise(line))


def lengths(lines):
    """Return the number of words of each length from 1 to 20."""
    import numpy as np

    counts = np.zeros(20, np.int64)
    for line in split(lines):
        for word in line:
            counts[min(len(word), 20) - 1] += 1
    return counts
