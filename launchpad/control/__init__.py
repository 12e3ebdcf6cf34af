"""Lets another terminal query and stop a running job, over a Unix socket in a folder that only this user can enter.

A request is a line of JSON; the response is text, up to end of file.
"""
