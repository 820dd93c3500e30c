"""The report of a model's kernels: their computation and memory traffic, the forecast of calls, and one page that shows them.

`numbers` collects, `plots` draws, `page` writes HTML and CSV from the same numbers.
"""
