"""A fleet on one machine for `tidegate demo`: regions of real nodes, traffic over HTTP, faults at the press of a key.

`stores` are the origins and the database, with the faults that they can have; `fleet` starts nodes on them; `traffic`
sends requests and counts the answers; `view` writes what is seen as lines of text; `session` connects all of these.
Laws: a node is the `Service` that `tidegate serve` runs, with nothing removed. All nodes run in this process. What is
started here is stopped here, and nothing is left: no process, no file.
"""
