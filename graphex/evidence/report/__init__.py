"""The report: what happened to a model, as one HTML file that needs nothing but a browser.

`model` joins a journal with the snapshots of its graphs into plain data, with links from each sentence to what it names
and with how the report came about; `summary` makes the sentences, and `page` writes the file and reads it again.
`compare` holds two reports against each other. The program that shows a report in the browser is in `assets/`.
"""
