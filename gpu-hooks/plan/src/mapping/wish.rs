//! Parses which GPUs a user asks for.

/// The container's annotation that maps its GPUs.
pub const ANNOTATION: &str = "dev.cryopod.gpu.map";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Wish {
    /// The same GPUs where they exist, else others that match.
    #[default]
    Auto,
    /// These: each side a UUID (AMD: unique id), an index, a PCI address, a device node or a render minor
    /// (`renderD130`). Recorded GPUs that are not named keep their place.
    Pairs(Vec<(String, String)>),
}

impl std::str::FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() || text == "auto" {
            return Ok(Self::Auto);
        }
        let pairs = text.split(',').map(|pair| {
            let sides = pair.split_once('=').map(|(old, new)| (old.trim(), new.trim()));
            match sides {
                Some((old, new)) if !old.is_empty() && !new.is_empty() => Ok((old.to_owned(), new.to_owned())),
                _ => Err(format!("{pair:?} is not OLD=NEW; write `auto` or OLD=NEW[,OLD=NEW...] with GPU UUIDs, indices, PCI addresses, or nodes such as /dev/nvidia1 and /dev/dri/renderD130")),
            }
        });
        pairs.collect::<Result<_, _>>().map(Self::Pairs)
    }
}
