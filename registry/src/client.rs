//! Connects to a registry: protocol, credentials, limits.

use std::future::Future;
use std::time::Duration;

use oci_spec::distribution::Reference;

use crate::session::{RegistrySession, TokenAccess};
use crate::trust::{RegistryOrigin, Transport};
use crate::{Error, RegistryOptions, auth};

/// A registry that has answered, for one image.
pub(crate) struct Registry {
    pub(crate) session: RegistrySession,
    pub(crate) image: Reference,
    step_limit: Duration,
}

impl Registry {
    pub(crate) async fn connect(
        image: &Reference,
        access: TokenAccess,
        options: &RegistryOptions,
    ) -> Result<Self, Error> {
        let credentials = match &options.credentials {
            Some(given) => Some((given.clone(), RegistryOrigin::Given)),
            None => {
                let (registry, repository) = (image.registry(), image.repository());
                let found = auth::find(options.auth_file.as_deref(), registry, repository)?;
                found.map(|stored| (stored, RegistryOrigin::Stored))
            }
        };
        let with = |transport| {
            let session =
                RegistrySession::new(image, transport, access, credentials.clone(), options)?;
            Ok::<_, Error>(Self {
                session,
                image: image.clone(),
                step_limit: options.step_limit,
            })
        };
        // The certificate may be valid although nobody asks for that: credentials then go where they go otherwise.
        let allowed: &[Transport] = match options.tls_verify {
            true => &[],
            false => &[Transport::UnverifiedTls, Transport::Plain],
        };
        let mut others = allowed.iter();
        let mut transport = Transport::Tls;
        loop {
            let registry = with(transport)?;
            let connected = registry.session.connect();
            match registry.within("asking for access", connected).await {
                Err(Error::Connect {
                    registry, reason, ..
                }) => match others.next() {
                    Some(next) => transport = *next,
                    None => {
                        return Err(Error::Connect {
                            registry,
                            reason,
                            tls: options.tls_verify,
                        });
                    }
                },
                done => return done.map(|()| registry),
            }
        }
    }

    /// Runs one step of the session within the time limit.
    pub(crate) async fn within<T>(
        &self,
        step: &str,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(self.step_limit, future).await {
            Ok(done) => done,
            Err(_) => Err(self.failed(
                step,
                format!("no answer within {} s", self.step_limit.as_secs()),
            )),
        }
    }

    pub(crate) fn failed(&self, step: &str, reason: impl Into<String>) -> Error {
        Error::Step {
            image: self.image.to_string(),
            step: step.into(),
            reason: reason.into(),
        }
    }

    pub(crate) fn content(&self, reason: impl Into<String>) -> Error {
        Error::Content {
            image: self.image.to_string(),
            reason: reason.into(),
        }
    }
}
