"""Studies: the runs that answer a question, and the figures that show the answer.

``sweep.py`` runs a study, ``compare.py --study`` draws it.
"""
