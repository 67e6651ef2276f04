"""Every byte between the processes: notebook, controller, agent, template and ranks.

Independent of what the messages cause.

    frames                                   a message as bytes, and back
    life, processes, cells, output           the messages, by subject
        questions                                what can be asked, each with the type of its answer:
            question, stopping, knowing            shared parts; stops and process groups; costs and names
    lanes                                    the connections that carry messages
"""
