"""Lightning callbacks that write what people look at."""
