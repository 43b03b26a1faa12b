//! Warnings about setups that are allowed but may be mistakes: logged once, when a server starts.

use blockhouse_config::control_socket::ControlSocket;
use blockhouse_config::setup::Setup;
use blockhouse_images::CacheMode;
use blockhouse_nbd::uri::{Address, NbdUri, Security};

/// The warnings about `setup`, one line each.
pub(crate) fn about(setup: &Setup) -> Vec<String> {
    let everywhere = setup.nbd.iter().filter_map(|(address, _)| warn_of_address(address));
    let is_unsafe = setup.disks.iter().any(|disk| disk.cache == CacheMode::Unsafe);
    let cache = is_unsafe.then(|| {
        "--cache unsafe: flushes are not carried out, so a crash of the host or a loss of power can damage the disk; \
         use it for what can be made again"
            .to_owned()
    });
    let is_open_to_others = |control: &&ControlSocket| {
        control.permissions.mode.is_some_and(|mode| mode & 0o002 != 0)
            && control.answers.has_changes()
    };
    let sockets = setup.server.control.iter().chain(&setup.server.qmp);
    let control = sockets.filter(is_open_to_others).map(|control| {
        format!(
            "{}: the mode of this control socket lets every user of this host do what this server may; leave others out, \
             as in mode=0660, or let it be read-only",
            control.path.display()
        )
    });
    everywhere.chain(cache).chain(control).chain(warn_of_nothing(setup)).collect()
}

/// The warning about a configuration that serves nothing.
fn warn_of_nothing(setup: &Setup) -> Option<String> {
    let path = setup.config.as_ref()?;
    if !(setup.nbd.is_empty() && setup.devices.is_empty() && setup.ublk.is_empty()) {
        return None;
    }
    let how = match &setup.server.control {
        Some(control) => format!("or ask at {} (blockhouse ctl)", control.path.display()),
        None => "and reload it by SIGHUP: there is no control socket either".to_owned(),
    };
    Some(format!(
        "{}: nothing is served: no disk in it has exports; add [[disk]] with path and exports, {how}",
        path.display()
    ))
}

/// The warning about a socket that listens at all addresses of the host.
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
