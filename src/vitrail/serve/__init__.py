"""A model behind HTTP: an API for programs and a page for people.

request -reading-> files -threads-> uint8 views -batching (a thread a model)-> numbers -app-> JSON, PNG
"""
