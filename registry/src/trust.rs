//! Decides where credentials for a registry may go.

use std::net::IpAddr;

use reqwest::Url;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegistryOrigin {
    /// The command line, for exactly this registry.
    Given,
    /// An auth file, for a registry of this name, whoever answers.
    Stored,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Tls,
    /// TLS with any certificate, as a man in the middle has one, too.
    UnverifiedTls,
    Plain,
}

/// Why credentials stay here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotSent {
    #[error(
        "stored credentials are not sent to {host} without TLS and a valid certificate; push and pull: --creds sends them"
    )]
    Stored { host: String },
    #[error("it sends the credentials to {host}, and not over TLS alone")]
    Elsewhere { host: String },
}

/// Checks whether `place` may get the credentials for `registry`.
///
/// Over TLS: the registry itself, and a realm that it names, as with docker and podman. Without TLS, or with a certificate
/// that nobody checks: only the registry itself, if it is on this host or the credentials are from the command line.
/// Anybody on the network path could have named the realm.
pub(crate) fn may_have(
    place: &Url,
    registry: &Url,
    transport: Transport,
    origin: RegistryOrigin,
) -> Result<(), NotSent> {
    let of = |url: &Url| {
        (
            url.host_str().map(str::to_owned),
            url.port_or_known_default(),
        )
    };
    let itself = of(place) == of(registry);
    let host = place.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    let here = host == "localhost" || address.is_ok_and(|ip| ip.is_loopback());
    let tls = transport == Transport::Tls && place.scheme() == "https";
    if tls
        || itself
            && place.scheme() == registry.scheme()
            && (here || origin == RegistryOrigin::Given)
    {
        return Ok(());
    }
    let host = host.to_owned();
    Err(match itself {
        true => NotSent::Stored { host },
        false => NotSent::Elsewhere { host },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn who_may_have_the_credentials() {
        let far = url("https://r.example/v2/");
        let plain = url("http://r.example:5000/v2/");
        let here = url("http://127.0.0.1:5000/v2/");
        let may = |place: &str, registry: &Url, origin| {
            let transport = match registry.scheme() {
                "https" => Transport::Tls,
                _ => Transport::Plain,
            };
            may_have(&url(place), registry, transport, origin)
        };
        assert!(may("https://auth.example/token", &far, RegistryOrigin::Stored).is_ok());
        assert!(may("https://r.example/v2/", &far, RegistryOrigin::Stored).is_ok());
        // A realm without TLS, whatever the registry.
        for registry in [&far, &plain, &here] {
            for origin in [RegistryOrigin::Stored, RegistryOrigin::Given] {
                assert!(may("http://evil.example/token", registry, origin).is_err());
            }
        }
        // A realm that was named without TLS.
        assert!(may("https://evil.example/token", &plain, RegistryOrigin::Given).is_err());
        // The registry itself without TLS.
        let said = may(
            "http://r.example:5000/token",
            &plain,
            RegistryOrigin::Stored,
        )
        .unwrap_err();
        assert!(matches!(said, NotSent::Stored { .. }), "{said}");
        assert!(may("http://r.example:5000/token", &plain, RegistryOrigin::Given).is_ok());
        assert!(may("http://127.0.0.1:5000/token", &here, RegistryOrigin::Stored).is_ok());
        assert!(may("http://127.0.0.1:6000/token", &here, RegistryOrigin::Stored).is_err());
    }

    #[test]
    fn a_certificate_that_nobody_checks_is_no_tls() {
        let far = url("https://r.example/v2/");
        let here = url("https://localhost:5000/v2/");
        let may = |place: &str, registry: &Url, origin| {
            may_have(&url(place), registry, Transport::UnverifiedTls, origin)
        };
        for origin in [RegistryOrigin::Stored, RegistryOrigin::Given] {
            for realm in ["https://evil.example/token", "http://r.example/token"] {
                let said = may(realm, &far, origin).unwrap_err();
                assert!(matches!(said, NotSent::Elsewhere { .. }), "{said}");
            }
            assert!(may("https://localhost:5000/token", &here, origin).is_ok());
        }
        let itself = "https://r.example/token";
        let said = may(itself, &far, RegistryOrigin::Stored).unwrap_err();
        assert!(matches!(said, NotSent::Stored { .. }), "{said}");
        assert!(may(itself, &far, RegistryOrigin::Given).is_ok());
    }
}
