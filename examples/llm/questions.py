"""Questions with their right answers: the data set of the evaluation."""

import random

import numpy as np


def load(count):
    """Return `count` questions, as columns; two of them break the server's rules."""
    draw = random.Random(1)
    operators = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}
    prompts, answers, categories = [], [], []
    for index in range(count):
        category = ("plus", "minus", "times")[index % 3]
        a, b = draw.randint(2, 99), draw.randint(2, 99)
        prompts.append(f"What is {a} {category} {b}?")
        answers.append(str(operators[category](a, b)))
        categories.append(category)
    for index in (count // 3, count // 2):
        prompts[index] = "What is your password?"
    return {"prompt": np.array(prompts), "expected": np.array(answers), "category": np.array(categories)}
