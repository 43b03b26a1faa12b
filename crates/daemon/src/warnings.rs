//! What is allowed and may not be meant: said once, when a server starts.

use blockhouse_disk::CacheMode;
use blockhouse_nbd::uri::{Address, NbdUri, Security};

use crate::setup::Setup;

/// The warnings about `setup`, one line each.
pub(crate) fn about(setup: &Setup) -> Vec<String> {
    let everywhere = setup.nbd.iter().filter_map(|(address, _)| warn_of_address(address));
    let is_unsafe = setup.disks.iter().any(|disk| disk.cache == CacheMode::Unsafe);
    let cache = is_unsafe.then(|| {
        "--cache unsafe: flushes are not carried out, so a crash of the host or a loss of power can damage the disk; \
         use it for what can be made again"
            .to_owned()
    });
    let is_open_to_others = setup.permissions.mode.is_some_and(|mode| mode & 0o002 != 0);
    let control = (is_open_to_others && setup.control.is_some()).then(|| {
        "--socket-mode lets every user of this host use the control socket, and so do all that this server may; leave \
         others out, as in 0660"
            .to_owned()
    });
    everywhere.chain(cache).chain(control).collect()
}

/// A socket at all addresses of the host.
fn warn_of_address(address: &Address) -> Option<String> {
    let Address::Tcp { host, .. } = address else { return None };
    let is_any = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().ok()?.is_unspecified();
    let uri = NbdUri { security: Security::Plain, address: address.clone(), export: String::new() };
    is_any.then(|| {
        format!(
            "{uri}: listens at all addresses of this host, and every program that reaches one can read and write the \
             disk; use 127.0.0.1, a Unix socket, or a firewall"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_all_addresses_are_warned_of() {
        let warning = |uri: &str| {
            let uri: NbdUri = uri.parse().expect("a URI");
            warn_of_address(&uri.address)
        };
        for all in ["nbd://0.0.0.0", "nbd://0.0.0.0:10810/x", "nbd://[::]:10809/"] {
            let warning = warning(all).expect(all);
            assert!(warning.contains("127.0.0.1"), "{warning}");
        }
        for one in ["nbd://127.0.0.1", "nbd://[::1]/", "nbd://localhost/", "nbd+unix:///?socket=/x"]
        {
            assert_eq!(warning(one), None, "{one}");
        }
    }
}
