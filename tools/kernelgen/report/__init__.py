"""The report of a model's kernels: what they compute and move, how long calls take by the forecast, and one page that shows it.

`numbers` collects, `plots` draws, `page` writes HTML and CSV of the same numbers, `baseline` compares two reports.
"""
