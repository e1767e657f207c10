"""Files from strangers: read line by line and member by member, checked, never executed, with a place for every complaint."""
