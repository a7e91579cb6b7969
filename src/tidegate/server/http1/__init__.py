"""HTTP/1.1 on asyncio: sockets, framing, deadlines, order of answers.

Laws: it knows requests as bytes and answers as (status, header lines, body). It imports neither the API nor the catalog
nor the process, and no rule about rate limits is here. Every byte, object and second that a client can cost has a
bound here, and is checked before the request is looked at.
"""
