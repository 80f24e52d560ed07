//! Names, layout and schema of cryopod checkpoint files.
