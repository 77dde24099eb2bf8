"""`forge-run data prepare`: from text, JSON lines and Parquet to shards of token ids.

One process reads the inputs in order (`inputs`, `text_files`, `parquet_files`) and cuts them into chunks. Workers
encode chunks (`encoding`). The first process appends the results, in order, to shards (`writing`), and records its
position (`folder`), so that a command that was killed continues. The output depends on nothing but the inputs and the
arguments: chunks only decide which worker encodes what, and when.
"""
