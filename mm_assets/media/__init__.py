"""Facts about bytes: types, headers, codecs and notations of images, sound, video, scores and text.

Bytes in, facts or arrays out. Nothing here opens a file or knows a field, a row or a container.
"""
