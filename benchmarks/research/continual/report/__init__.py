"""One page and one JSON file about a folder of streams.

content     what the JSON file holds, read from the folder; the page is made of nothing else
page        its tables and figures; templates/stream.html.j2 has the words;  names: what methods are called
command     python -m benchmarks.research.continual report (--out DIR | --from-json FILE) [--html FILE] [--json FILE]
"""
