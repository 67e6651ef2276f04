"""Every byte between the processes: notebook, controller, agent, template and ranks.

Independent of what the messages cause.

base        what messages are made of: their bounds, ranks, keys, values
processes   what is said before there is a socket
messages    the messages, by subject: how ranks start and end, cells, output, healing
questions   what can be asked, each with the type of its answer: stops and groups, costs and names
frames      a message as bytes, and back; `bundle` sends several as one
lanes       the connections that carry them; `listener` accepts those that have a key
segments    shared memory that carries large values; `segment_copies` copies it to other machines
"""
