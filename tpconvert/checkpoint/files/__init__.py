"""Files of tensors: headers, bytes, hashes, and folders elsewhere."""
