"""Generated worlds that several recipes share."""
