"""Work that a stranger's file or request decides, in processes whose time and memory are limited."""
