//! The event log: one JSON object a line, what happened to whose memory on which GPU.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

pub struct Events(Mutex<Option<File>>);

impl Events {
    pub fn to(path: Option<&Path>) -> io::Result<Self> {
        let file = match path {
            Some(p) => Some(OpenOptions::new().create(true).append(true).open(p)?),
            None => None,
        };
        Ok(Self(Mutex::new(file)))
    }

    /// Writes one event. `fields` is an object. A log that cannot be written is not an error of
    /// the simulated driver.
    pub fn write(&self, event: &str, fields: Value) {
        let mut line = Map::new();
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        line.insert("t".into(), now.as_secs_f64().into());
        line.insert("event".into(), event.into());
        if let Value::Object(fields) = fields {
            line.extend(fields);
        }
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(f) = file.as_mut() {
            let _ = writeln!(f, "{}", Value::Object(line));
        }
    }
}
