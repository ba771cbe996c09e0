"""A grid of hyper-parameters, each scored on five folds of the digits data set."""

import functools

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import SVC

from pipedist.combiners import by_key_moments


def grid(costs, gammas, folds):
    """Return one element per combination: its parameters, and the fold to hold out."""
    cost, gamma, fold = np.meshgrid(np.array(costs), np.array(gammas), np.arange(folds), indexing="ij")
    return {"cost": cost.ravel(), "gamma": gamma.ravel(), "fold": fold.ravel()}


@functools.cache  # once per worker
def data(folds):
    images, labels = load_digits(return_X_y=True)
    parts = StratifiedKFold(folds, shuffle=True, random_state=0).split(images, labels)
    return images / 16, labels, list(parts)


def accuracy(trial, folds):
    """Train on all folds but one, and return the accuracy on that one."""
    images, labels, parts = data(folds)
    fit, test = parts[trial["fold"]]
    model = SVC(C=trial["cost"], gamma=trial["gamma"]).fit(images[fit], labels[fit])
    return {**trial, "accuracy": model.score(images[test], labels[test])}


def by_setting(rows):
    """Return the moments of the accuracy, by setting."""
    settings = [
        f"C={cost:g} gamma={gamma:g}" for cost, gamma in zip(rows["cost"], rows["gamma"], strict=True)
    ]
    return by_key_moments.of(settings, rows["accuracy"])
