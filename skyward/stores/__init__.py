"""Folders of files on a disk or in an object store, behind one interface."""
