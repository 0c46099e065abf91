"""The report: what happened to a model, as one HTML file that needs nothing but a browser.

`data` joins a journal with the snapshots of its graphs, links each sentence to what it names, and says how the report
came about; `summary` makes the sentences, and `page` writes the file and reads it again.
`compare` holds two reports against each other. The program that shows a report in the browser is in `assets/`.
"""
