//! The claims of tasks: at most one task at a time opens, closes or changes the disk, node or
//! socket of a name.
//!
//! Guarantee: changes of different disks never wait for each other, so a disk that hangs blocks
//! only its own operations.

use std::collections::BTreeSet;

use blockhouse_core::sync::Condvar;
use parking_lot::Mutex;

/// The names that are claimed.
#[derive(Default)]
pub struct Claims {
    claimed: Mutex<BTreeSet<Name>>,
    released: Condvar,
}

/// The names that can be claimed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// A disk.
    Disk(String),
    /// A node of QMP.
    Node(String),
    /// The address of a listening socket, as text.
    Socket(String),
    /// The configuration as a whole.
    Configuration,
}

/// Names that only the owner of this claim may change, until the claim is dropped.
pub struct Claim<'a> {
    claims: &'a Claims,
    names: Vec<Name>,
}

impl Claims {
    /// Waits until all of these names are free, and claims them together, so that two tasks never
    /// wait for each other.
    pub async fn claim(&self, names: impl Into<Vec<Name>>) -> Claim<'_> {
        let mut names = names.into();
        names.sort();
        names.dedup();
        let is_claimed = || {
            let mut claimed = self.claimed.lock();
            let is_free = !names.iter().any(|name| claimed.contains(name));
            is_free.then(|| claimed.extend(names.iter().cloned()))
        };
        self.released.wait_until(is_claimed).await;
        Claim { claims: self, names }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        {
            let mut claimed = self.claims.claimed.lock();
            claimed.retain(|name| !self.names.contains(name));
        }
        self.claims.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_name_is_claimed_once_and_others_do_not_wait() {
        let claims = Claims::default();
        let [a, b, socket] =
            [Name::Disk("a".into()), Name::Disk("b".into()), Name::Socket("a".into())];
        let first = claims.claim([a.clone(), socket]).now_or_never().expect("they are free");
        let second = claims.claim([b.clone()]).now_or_never().expect("another name");
        let mut both = pin!(claims.claim([a.clone(), b.clone(), a.clone()]));
        assert!(both.as_mut().now_or_never().is_none());
        drop(first);
        assert!(both.as_mut().now_or_never().is_none(), "one is claimed still");
        // A task that waits for several claims holds none of them.
        drop(claims.claim([a]).now_or_never().expect("it is free"));
        drop(second);
        drop(both.now_or_never().expect("both are free"));
    }
}
