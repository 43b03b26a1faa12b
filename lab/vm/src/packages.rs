//! The packages of the guest: from Debian, fetched by a private apt and unpacked into a cache.
//!
//! Nothing is installed, and the host's own apt configuration is neither read nor changed: the
//! kernel comes from backports whatever the host runs. A cache of the same list of packages is used
//! without network access; removing the cache fetches the newest packages. A second kernel, of the
//! next release's backports, is fetched when a scenario needs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use lab_tools::apt::extract_all;
use lab_tools::process::{run, stdout_of};

/// The metapackage that names the newest kernel, and where it is.
const KERNEL: &str = "linux-image-amd64";
const SUITE: &str = "bookworm";
const KERNEL_SUITE: &str = "bookworm-backports";
/// The suite with the newest kernel of the next release.
const NEWER_SUITE: &str = "trixie-backports";
/// The prefixes of the names of its packages: the image, the modules, and lists of what is built
/// in. The package that [`KERNEL`] depends on is empty there.
const NEWER_PARTS: [&str; 3] = ["linux-binary", "linux-modules", "linux-base"];
/// The keys of the packages' signatures. The file is part of every Debian, and in a package of that
/// name elsewhere.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Tools of the guest; apt knows what they need.
const TOOLS: &[&str] =
    &["busybox-static", "dmsetup", "e2fsprogs", "fio", "nbd-client", "xfsprogs", "xz-utils"];

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    root: PathBuf,
    /// The version, which is the name of its folder of modules.
    version: String,
}

impl Kernel {
    /// The only kernel in a folder.
    fn unpacked(root: PathBuf) -> Result<Self> {
        let modules = root.join("lib/modules");
        let folders = std::fs::read_dir(&modules)
            .with_context(|| format!("no kernel modules in {}", modules.display()))?;
        let names: Vec<_> = folders.collect::<Result<_, _>>()?;
        let [folder] = &names[..] else {
            bail!("{} kernels in {}", names.len(), modules.display())
        };
        let version = folder.file_name().to_str().context("a kernel without a name")?.to_owned();
        Ok(Self { root, version })
    }

    /// The newer kernel, which is fetched unless it is in `cache`.
    pub fn fetch_newer(cache: &Path) -> Result<Self> {
        let root = cache.join("root");
        let stamp = cache.join("packages");
        if !stamp.exists() {
            println!("vm: fetching a newer kernel into {}", cache.display());
            let apt = Apt::prepare(cache, &[NEWER_SUITE])?;
            apt.download_newer_kernel()?;
            extract_all(&apt.archives(), &root)?;
            std::fs::remove_dir_all(cache.join("apt")).context("cannot remove the packages")?;
            // The link exists in the older release, and depmod expects it.
            std::os::unix::fs::symlink("usr/lib", root.join("lib"))?;
            std::fs::write(&stamp, NEWER_PARTS.join("\n"))?;
        }
        Self::unpacked(root)
    }

    /// The version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Where it was unpacked.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of its modules.
    pub fn modules(&self) -> PathBuf {
        self.root.join("lib/modules").join(&self.version)
    }

    /// The compressed image, whose path depends on the release.
    pub fn image(&self) -> PathBuf {
        let older = self.root.join("boot").join(format!("vmlinuz-{}", self.version));
        if older.exists() { older } else { self.modules().join("vmlinuz") }
    }
}

/// Unpacked packages.
pub struct Packages {
    root: PathBuf,
    kernel: Kernel,
}

impl Packages {
    /// Why this host cannot fetch packages; `None` if it can.
    pub fn unavailable() -> Option<String> {
        let programs = ["apt-get", "apt-cache", "dpkg-deb"];
        if let Some(program) =
            programs.iter().find(|program| lab_tools::process::find_program(program).is_none())
        {
            return Some(format!("{program} is not there to fetch the guest's packages"));
        }
        (!Path::new(KEYRING).exists())
            .then(|| format!("{KEYRING} is missing; install debian-archive-keyring"))
    }

    /// The packages, which are fetched unless they are in `cache`.
    pub fn fetch(cache: &Path) -> Result<Self> {
        let root = cache.join("root");
        let stamp = cache.join("packages");
        let wanted = TOOLS.join("\n");
        if std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Self::unpacked(root);
        }
        println!("vm: fetching a kernel and tools into {}", cache.display());
        let apt = Apt::prepare(cache, &[SUITE, KERNEL_SUITE])?;
        apt.download()?;
        extract_all(&apt.archives(), &root)?;
        std::fs::remove_dir_all(cache.join("apt")).context("cannot remove the packages")?;
        let packages = Self::unpacked(root)?;
        std::fs::write(&stamp, wanted)
            .with_context(|| format!("cannot write {}", stamp.display()))?;
        Ok(packages)
    }

    fn unpacked(root: PathBuf) -> Result<Self> {
        Ok(Self { kernel: Kernel::unpacked(root.clone())?, root })
    }

    /// The kernel that guests have unless a scenario asks for the newer one.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// A file by its path in the guest, without the leading slash.
    pub fn file(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The file of a program by its name.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let folders = ["bin", "sbin", "usr/bin", "usr/sbin"];
        let mut files = folders.iter().map(|folder| self.root.join(folder).join(name));
        files.find(|file| file.is_file()).with_context(|| format!("no package holds {name}"))
    }

    /// The loader of these packages' programs, with their libraries.
    pub fn loader(&self) -> Command {
        let mut command = Command::new(self.file("lib64/ld-linux-x86-64.so.2"));
        // The last folder has private libraries of Ceph.
        let folders =
            ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph"];
        let folders = folders.map(|folder| self.file(folder).display().to_string());
        command.arg("--library-path").arg(folders.join(":"));
        command
    }

    /// A command that runs one of these programs on this host.
    pub fn command(&self, program: &str) -> Result<Command> {
        let mut command = self.loader();
        command.arg(self.program(program)?);
        Ok(command)
    }
}

/// apt with its own configuration and lists.
struct Apt {
    folder: PathBuf,
    configuration: PathBuf,
}

impl Apt {
    /// Makes the configuration for packages of these suites in `cache`, and an empty folder to
    /// unpack them in.
    fn prepare(cache: &Path, suites: &[&str]) -> Result<Self> {
        for folder in [
            "root",
            "apt/apt.conf.d",
            "apt/preferences.d",
            "apt/lists/partial",
            "apt/cache/archives/partial",
        ] {
            let folder = cache.join(folder);
            let _ = std::fs::remove_dir_all(&folder);
            std::fs::create_dir_all(&folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        Self::configure(&cache.join("apt"), suites)
    }

    fn configure(folder: &Path, suites: &[&str]) -> Result<Self> {
        let source = |suite: &&str| {
            format!("deb [signed-by={KEYRING}] http://deb.debian.org/debian {suite} main\n")
        };
        let text = format!(
            "Dir::Etc \"{0}\";\nDir::Etc::sourcelist \"{0}/sources.list\";\n\
             Dir::Etc::sourceparts \"-\";\nDir::State \"{0}\";\nDir::State::lists \"{0}/lists\";\n\
             Dir::State::status \"{0}/status\";\nDir::Cache \"{0}/cache\";\n\
             APT::Architecture \"amd64\";\nAPT::Architectures {{ \"amd64\"; }};\n\
             APT::Sandbox::User \"root\";\n",
            folder.display()
        );
        let write = |name: &str, text: &str| {
            let file = folder.join(name);
            std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
        };
        write("sources.list", &suites.iter().map(source).collect::<String>())?;
        write("status", "")?;
        write("apt.conf", &text)?;
        Ok(Self { folder: folder.to_owned(), configuration: folder.join("apt.conf") })
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.configuration).args(["--quiet=2"]).args(args);
        command
    }

    fn download(&self) -> Result<()> {
        run(self.command("apt-get", &["update"]))?;
        let depends = ["--target-release", KERNEL_SUITE, "depends", KERNEL];
        let depends = stdout_of(self.command("apt-cache", &depends))?;
        let kernel = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        let kernel = kernel.with_context(|| format!("{KERNEL} names no kernel"))?;
        let mut download = self.command("apt-get", &["download"]);
        download.arg(format!("{kernel}/{KERNEL_SUITE}")).current_dir(self.archives());
        run(download)?;
        // apt knows no installed package, so it also fetches all dependencies of the tools, but no
        // recommended packages.
        let install = ["install", "--yes", "--download-only", "--no-install-recommends"];
        let mut tools = self.command("apt-get", &install);
        tools.args(TOOLS);
        run(tools)
    }

    fn download_newer_kernel(&self) -> Result<()> {
        run(self.command("apt-get", &["update"]))?;
        let depends = stdout_of(self.command("apt-cache", &["depends", KERNEL]))?;
        let kernel =
            depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
        let version = kernel.with_context(|| format!("{KERNEL} names no kernel"))?;
        let mut download = self.command("apt-get", &["download"]);
        download.args(NEWER_PARTS.map(|part| format!("{part}-{version}")));
        download.current_dir(self.archives());
        run(download)
    }

    /// Where downloaded packages are.
    fn archives(&self) -> PathBuf {
        self.folder.join("cache/archives")
    }
}
