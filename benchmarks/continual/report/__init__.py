"""One page for people, and one JSON file, of a folder of streams.

findings    what the folder holds, read once
sentences   who won, by how much, within what error; first where InduceKV gains nothing or loses
tables, figures, overview    the parts of the page, each of findings alone
page        puts them together
command     python -m benchmarks.continual report --out DIR [--html FILE] [--json FILE]
"""
