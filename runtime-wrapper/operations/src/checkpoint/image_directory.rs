//! Makes the image directory of a checkpoint, and removes it again if it stays empty.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::error::Error;

pub(super) struct ImageDirectory {
    pub path: PathBuf,
    made: bool,
}

impl ImageDirectory {
    /// Makes the directory if it is missing.
    pub fn ready(path: &Path) -> Result<Self, Error> {
        if path.exists() && !path.is_dir() {
            return Err(Error::untouched(format!(
                "{}: the image path is not a directory; name another one",
                path.display()
            )));
        }
        let made = !path.exists();
        if made {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(Error::at(path, "the image directory cannot be made"))?;
        }
        Ok(Self {
            path: path.to_owned(),
            made,
        })
    }

    /// Keeps the directory, also if it is empty.
    pub fn keep(mut self) {
        self.made = false;
    }
}

impl Drop for ImageDirectory {
    fn drop(&mut self) {
        if self.made {
            // Succeeds only on an empty directory: logs and half-made images belong to the runtime.
            let _ = fs::remove_dir(&self.path);
        }
    }
}
