//! `hostile guest SOCKET SEED SECONDS` and `hostile client SOCKET NAME SEED SECONDS`: a guest or a
//! client that breaks rules at random for this time (see `blockhouse_tests::hostile`).
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_tests::hostile;
use blockhouse_tests::nbd::Address;
use fastrand::Rng;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().context("guest|client SOCKET [NAME] SEED SECONDS");
    let (party, socket) = (next()?, next()?);
    let name = if party == "client" { next()? } else { String::new() };
    let mut random = Rng::with_seed(next()?.parse()?);
    let until = Instant::now() + Duration::from_secs_f64(next()?.parse()?);
    match &party[..] {
        "guest" => hostile::guest(socket.as_ref(), &mut random, until),
        "client" => hostile::client(&Address::Unix(socket.into()), &name, &mut random, until),
        _ => bail!("{party}: guest or client"),
    }
    Ok(())
}
