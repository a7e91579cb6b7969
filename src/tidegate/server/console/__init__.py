"""The web console: who is being limited right now, why, and whether every region converges.

`local` answers what one worker knows, `documents` puts the answers of all workers together, `hub` sends them to
viewers, `sessions` identifies viewers, `catalog` changes keys and namespaces, `routes` is the HTTP side of it all, and
`static` has the page: modules and a style sheet of our own, which load nothing from elsewhere.

Laws: viewing must not slow decisions, so work happens only while there is a viewer, once a second, in bounded pieces. A
session sees one workspace, that of its key, and changes things through the operations of the API with the same
permissions. Every value that a client chose travels as JSON and is shown as text. Nothing here decides.
"""
