//! Maps of user and group ids of user namespaces.

use std::path::Path;

use serde_json::Value;

use crate::files::Host;

/// A map of ids: a `/proc/PID/uid_map`, a spec's `uidMappings`, or one in CRIU's images. Of each range the first id inside,
/// the first outside, and the count. Empty: there is no user namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdMap(Vec<[u64; 3]>);

impl FromIterator<[u64; 3]> for IdMap {
    fn from_iter<T: IntoIterator<Item = [u64; 3]>>(ranges: T) -> Self {
        let mut ranges: Vec<_> = ranges.into_iter().collect();
        ranges.sort_unstable();
        Self(ranges)
    }
}

impl IdMap {
    /// Reads a map of a process; empty if that cannot be read.
    pub fn read(host: &Host, file: impl AsRef<Path>) -> Self {
        Self::parse(&host.text(file).unwrap_or_default())
    }

    fn parse(text: &str) -> Self {
        let range = |line: &str| {
            let words = line.split_whitespace().map(|word| word.parse().ok());
            <[u64; 3]>::try_from(words.collect::<Option<Vec<_>>>()?).ok()
        };
        text.lines().filter_map(range).collect()
    }

    /// Returns a spec's map: `uidMappings` or `gidMappings`.
    pub fn of_spec(spec: &Value, name: &str) -> Self {
        let list = spec.pointer(&format!("/linux/{name}"));
        let list = list.and_then(Value::as_array).into_iter().flatten();
        let keys = ["containerID", "hostID", "size"];
        list.map(|range| keys.map(|key| range[key].as_u64().unwrap_or(0)))
            .collect()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the id inside; `None`: it is not mapped.
    pub fn inside(&self, id: u64) -> Option<u64> {
        let mut ranges = self.0.iter();
        ranges.find_map(|[inside, outside, count]| moved(id, *outside, *count, *inside))
    }

    /// Returns the id outside; `None`: it is not mapped.
    pub fn outside(&self, id: u64) -> Option<u64> {
        let mut ranges = self.0.iter();
        ranges.find_map(|[inside, outside, count]| moved(id, *inside, *count, *outside))
    }
}

fn moved(id: u64, from: u64, count: u64, to: u64) -> Option<u64> {
    let offset = id.checked_sub(from).filter(|offset| *offset < count)?;
    to.checked_add(offset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_inside_and_outside() {
        for (id, map, want) in [
            (0, "         0          0 4294967295\n", Some(0)),
            (0, "0 1000 1\n1 100000 65536\n", Some(1000)),
            (2, "0 1000 1\n1 100000 65536\n", Some(100_001)),
            (5, "0 1000 1\n", None),
            (0, "0 1000\n0 x 1\n", None),
            (0, "", None),
        ] {
            let map = IdMap::parse(map);
            assert_eq!(map.outside(id), want, "{id} {map:?}");
            assert_eq!(want.map_or(Some(id), |id| map.inside(id)), Some(id));
        }
        let spec = json!({"linux": {"uidMappings": [
            {"containerID": 1, "hostID": 100000, "size": 65536}, {"containerID": 0, "hostID": 1000, "size": 1},
        ]}});
        let of_kernel = IdMap::parse("0 1000 1\n1 100000 65536\n");
        assert_eq!(IdMap::of_spec(&spec, "uidMappings"), of_kernel);
        assert!(IdMap::of_spec(&spec, "gidMappings").is_empty());
    }
}
