//! Runs as CRIU's action script: asks the wrapper, and then gives a restored container what the wrapper cannot: from
//! here the container's namespaces are named by the process that CRIU names.

use std::path::Path;
use std::process::ExitCode;

use crate::restore::network_settings::{self, NetworkSettings};
use crate::restore::new_container::{self, NewContainer};
use crate::rootfs::frozen;
use crate::run::action_script::Stage;

/// Asks the wrapper whether CRIU may go on, and exits with its answer. `called_as`: this program's name, in the
/// operation's directory.
pub fn run(called_as: &Path) -> ExitCode {
    let stage = Stage::from_env();
    let directory = called_as.parent().unwrap_or(Path::new("/"));
    match stage.ask(directory) {
        Ok(true) => {
            if stage.name == network_settings::STAGE
                && let Some(settings) = NetworkSettings::asked(directory)
            {
                // A container without them is better than none.
                for failed in settings.set(stage.init) {
                    eprintln!("cryopod: a setting of the container's network is missing: {failed}");
                }
            }
            if stage.name == new_container::STAGE
                && let Some(new) = NewContainer::asked(directory)
                && let Err(e) = new.set_names(stage.init)
            {
                eprintln!("cryopod: the host name cannot be set: {e}");
            }
            ExitCode::SUCCESS
        }
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            frozen::thaw_noted(directory);
            eprintln!(
                "cryopod: stage {}: the runtime wrapper does not answer ({e}); CRIU stops here",
                stage.name
            );
            ExitCode::FAILURE
        }
    }
}
