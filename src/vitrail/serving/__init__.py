"""A model behind HTTP: an API for programs and a page for people.

request -uploads-> files -decoders (processes)-> model inputs -batching (a thread a model)-> results -routes-> JSON, PNG
"""
