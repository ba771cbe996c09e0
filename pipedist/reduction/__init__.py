"""Reductions in one fixed tree, so that their bits do not depend on workers or arrival order.

Entry points: `tree.Reduction` and `tree.FoldTree`. Worker processes make the partials of their calls (`partials`), and
the driver process folds the partials in step order.
`exact_integers` adds and multiplies integer arrays without overflow.
"""
