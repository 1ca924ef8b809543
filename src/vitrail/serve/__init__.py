"""A model behind HTTP: an API for programs and a page for people.

bytes -reading-> images -rooms (threads)-> uint8 views -batching (a thread a model)-> numbers -app-> JSON, PNG
"""
