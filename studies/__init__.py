"""Studies: which runs answer a question, and what they show.

``sweep.py`` makes the runs, ``compare.py --study`` draws them.
"""
