"""The report: what happened to a model, as one HTML file that needs nothing but a browser.

`model` joins a journal with the snapshots of its graphs into plain data, `summary` puts the data into sentences, and
`page` writes the file and reads it again. `made` says how the report came about, and `links` lead from a sentence to
what it names. `compare` holds two reports against each other. The program that shows a report in the browser is in
`assets/`.
"""
