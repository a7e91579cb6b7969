"""The operations of the wire API: what they check, in which order, and what they answer.

Laws: a request is a `Head` and the bytes of its body, an answer is (status, header lines, body); connections and
servers are not known here. An operation is written once: it runs to its first wait at once, and from there in a task.
"""
