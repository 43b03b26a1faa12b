//! Black-box tests: the binary as its users and its enemies see it.
#![forbid(unsafe_code)]

mod bad_input;
mod bench;
mod block_devices;
mod clients;
mod commit_and_rebase;
mod convert;
mod data_file;
mod durability;
mod engine_choice;
mod foreign_tools;
mod full_host;
mod full_host_qcow2;
mod habits;
mod hostile_handshakes;
mod hostile_parties;
mod hostile_requests;
mod image_commands;
mod image_tools;
mod io_poll;
mod locks;
mod lost_writes;
mod preallocation;
mod qemu_matrix;
mod random_requests;
mod readme;
mod registered_memory;
mod repair;
mod resize;
mod served_snapshots;
mod shutdown;
mod sigkill;
mod snapshots;
mod upgrades;
mod vhost_user;
mod vmstate;
