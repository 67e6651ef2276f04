"""Every byte between the processes: notebook, controller, agent, template and ranks. Knows nothing of what it causes.

frames                                   a message as bytes, and back
life, processes, cells, output, questions    the messages, by subject
lanes                                    the connections that carry them
"""
