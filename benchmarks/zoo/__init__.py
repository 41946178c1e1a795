"""Networks of many libraries, answered by the installed command and by their own library."""
