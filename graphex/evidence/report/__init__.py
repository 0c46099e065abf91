"""The report: what happened to a model, as one HTML file that needs nothing but a browser.

`film` keeps the graphs before and after each pass as plain data, `nodes` says what is told of a node, `model` joins the
film with the journal, `summary` puts it into sentences, `sources` adds the user's own lines, `compare` holds two
reports against each other, and `page` writes the file. What the page does in the browser is in `assets/`.
"""
