"""The command line: each command parses, makes one call of the library, and renders; queue logic is none of its business."""
