"""One page and one JSON file about a folder of streams.

content     what the JSON file holds, read from the folder; the page is made of nothing else
ranking     who is compared with whom, and who is ahead
tables, figures    parts of the page
page        the numbers of the page; templates/stream.html.j2 has the words
command     python -m benchmarks.continual report (--out DIR | --from-json FILE) [--html FILE] [--json FILE]
"""
