//! NCCL's communicators of a container's processes: taken down before the driver's checkpoint, and made again afterwards.
//!
//! The driver cannot restore processes that have each other's GPU memory mapped. The preload library in each process
//! counts the calls of every communicator, and can destroy and make communicators under the program's handles. What
//! needs to know all ranks is done here:
//!
//! * [`Group::down`] finds a moment at which all ranks have made the same calls, so that none waits for another one's. As
//!   MANA does for MPI: ranks that are behind run on until they are level with the one that is ahead, and in doing so
//!   may move the goal of others. Then the communicators are destroyed.
//! * [`Group::up`] carries a fresh unique id from the first rank of each communicator to the others.
//!
//! Every wait has a limit, after which the processes go on. A process whose communicators cannot be made again gets
//! NCCL's own error from them, as after the death of a rank.

use super::Library;
use crate::messages::protocol::{NcclDone, NcclStep};
use crate::procfs;
use cryopod_preload_wire::nccl::{
    Clock, Comm, Fresh, Kind, Report, State, UNIQUE_ID, encode_clocks, encode_fresh,
};
use cryopod_preload_wire::{Reason, Request};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::time::{Duration, Instant};

/// How long the library may take to tell about its communicators.
const LOOK: Duration = Duration::from_secs(5);
/// How long a communicator that is being made may lack ranks when a container is looked at.
const COMPLETE: Duration = Duration::from_secs(2);
/// How much longer than the agent's work the calls are held: they go on by themselves if the agent dies.
const MARGIN: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(2);
/// How long nothing may change before all calls are let pass for a moment. What no counter shows can need it: a
/// communicator that is being made, or destroyed.
const STALLED: Duration = Duration::from_millis(200);
const LET_PASS: Duration = Duration::from_millis(20);
/// How long the communicators may take to be destroyed, and to be made.
pub const DOWN: Duration = Duration::from_secs(60);
pub const UP: Duration = Duration::from_secs(120);

/// A process with the library.
struct Member {
    pid: i32,
    library: Library,
    report: Report,
}

impl Member {
    fn ask(&self, request: Request, data: &[u8], limit: Duration) -> io::Result<Vec<u8>> {
        self.library.ask_data(request, data, limit)
    }

    fn named(&self) -> String {
        format!("process {} ({})", self.pid, procfs::comm(self.pid))
    }

    fn failed(&self, error: &io::Error) -> String {
        format!("{}: the preload library: {error}", self.named())
    }
}

fn read(bytes: &[u8]) -> io::Result<Report> {
    let nonsense = || io::Error::other("its answer about NCCL makes no sense");
    Report::decode(bytes).ok_or_else(nonsense)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The processes of a container that have communicators and the library.
pub struct Group {
    members: Vec<Member>,
}

/// A counter, as both ends of it have it in common: the communicator, and sender and receiver.
type Link = (u64, Option<(u32, u32)>);

fn link(clock: &Clock) -> Link {
    let pair = match clock.kind {
        Kind::Collective => None,
        Kind::SendTo(peer) => Some((clock.rank, peer)),
        Kind::ReceiveFrom(peer) => Some((peer, clock.rank)),
    };
    (clock.comm, pair)
}

/// The counters that a rank of a communicator is to reach.
fn targets_of(goals: &BTreeMap<Link, u64>, own: &[Comm]) -> Vec<Clock> {
    let mut targets = Vec::new();
    for ((comm, pair), count) in goals {
        for Comm { rank, .. } in own.iter().filter(|own| own.id == *comm) {
            let kinds = match pair {
                None => [Some(Kind::Collective), None],
                Some((from, to)) => [
                    (from == rank).then_some(Kind::SendTo(*to)),
                    (to == rank).then_some(Kind::ReceiveFrom(*from)),
                ],
            };
            targets.extend(kinds.into_iter().flatten().map(|kind| Clock {
                comm: *comm,
                rank: *rank,
                kind,
                count: *count,
            }));
        }
    }
    targets
}

/// Whether a process has made exactly the calls that it is to have made.
fn is_level(report: &Report, targets: &[Clock]) -> bool {
    let made: HashMap<_, _> = (report.clocks.iter())
        .map(|clock| ((clock.comm, clock.rank, clock.kind), clock.count))
        .collect();
    report.inside == 0
        && targets.iter().all(|target| {
            let key = (target.comm, target.rank, target.kind);
            made.get(&key).copied().unwrap_or(0) == target.count
        })
}

impl Group {
    /// Asks the processes that have the library. One that has none, or one that knows nothing of NCCL, is left out.
    ///
    /// # Errors
    /// A process that has the library does not answer.
    pub fn of(pids: &[i32]) -> Result<Self, String> {
        let mut members = Vec::new();
        for pid in pids {
            let Some(library) = Library::of(*pid) else {
                continue;
            };
            let answer = library.ask_data(Request::NcclLook, &[], LOOK);
            match answer.and_then(|bytes| read(&bytes)) {
                Ok(report) => members.push(Member {
                    pid: *pid,
                    library,
                    report,
                }),
                // A library from before.
                Err(error) if error.kind() == io::ErrorKind::Other => {}
                Err(error) => {
                    let comm = procfs::comm(*pid);
                    return Err(format!(
                        "process {pid} ({comm}): the preload library: {error}"
                    ));
                }
            }
        }
        Ok(Self { members })
    }

    /// The same, once no communicator is being made.
    ///
    /// # Errors
    /// As for [`Group::of`].
    pub fn settled(pids: &[i32]) -> Result<Self, String> {
        let until = Instant::now() + COMPLETE;
        loop {
            let group = Self::of(pids)?;
            if group.is_complete() || Instant::now() >= until {
                return Ok(group);
            }
            std::thread::sleep(TICK);
        }
    }

    /// Whether a process is one of them.
    pub fn has(&self, pid: i32) -> bool {
        self.members.iter().any(|member| member.pid == pid)
    }

    /// Whether every communicator has one rank only.
    pub fn is_alone(&self) -> bool {
        let mut comms = self.members.iter().flat_map(|member| member.report.live());
        comms.all(|comm| comm.ranks == 1)
    }

    pub fn has_comms(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|member| member.report.live().next().is_some())
    }

    /// The ranks that are known of each communicator, and how many there should be.
    fn ranks(&self) -> BTreeMap<u64, (BTreeSet<u32>, u32)> {
        let mut ranks: BTreeMap<u64, (BTreeSet<u32>, u32)> = BTreeMap::new();
        for comm in self.members.iter().flat_map(|member| member.report.live()) {
            let (known, count) = ranks.entry(comm.id).or_default();
            known.insert(comm.rank);
            *count = comm.ranks.max(*count);
        }
        // A rank that has destroyed it is no longer waited for.
        let gone = self.members.iter().flat_map(|member| &member.report.comms);
        for comm in gone.filter(|comm| comm.state == State::Gone) {
            if let Some((known, _)) = ranks.get_mut(&comm.id) {
                known.insert(comm.rank);
            }
        }
        ranks
    }

    /// Whether all ranks of all communicators are known, and none is being made.
    fn is_complete(&self) -> bool {
        let live = |member: &Member| member.report.live().all(|c| c.state != State::Pending);
        let all = |(known, count): &(BTreeSet<u32>, u32)| known.len() >= *count as usize;
        self.members.iter().all(live) && self.ranks().values().all(all)
    }

    /// A process with a multicast object, and what to do: the driver's checkpoint of it would not end, whatever it is for.
    pub fn multicast(&self) -> Option<(i32, String)> {
        let why = Reason::Multicast.to_string();
        let has = |member: &&Member| member.report.obstacles.contains(&why);
        let pid = self.members.iter().find(has)?.pid;
        Some((pid, why))
    }

    /// Why the communicators cannot be taken down and made again: process and reason.
    pub fn obstacles(&self) -> Vec<(i32, String)> {
        let using = |member: &&Member| member.report.live().next().is_some();
        let members = self.members.iter().filter(using);
        let own = members.flat_map(|m| m.report.obstacles.iter().map(|why| (m.pid, why.clone())));
        own.chain(self.outside()).collect()
    }

    /// The processes with communicators that lack ranks.
    pub fn outside(&self) -> Vec<(i32, String)> {
        let ranks = self.ranks();
        let lacks = |comm: &&Comm| {
            let known = ranks.get(&comm.id);
            let lacks = known.is_some_and(|(known, count)| known.len() < *count as usize);
            lacks && (comm.ranks > 1 || comm.state == State::Pending)
        };
        let why = |comm: &Comm| {
            format!(
                "a communicator of {} ranks reaches processes outside of the container, or without the preload library, or one that has ended",
                comm.ranks
            )
        };
        let first = |member: &Member| Some((member.pid, why(member.report.live().find(lacks)?)));
        self.members.iter().filter_map(first).collect()
    }

    fn each(
        &mut self,
        mut request: impl FnMut(&Member) -> (Request, Vec<u8>),
    ) -> Result<(), String> {
        for member in &mut self.members {
            let (asked, data) = request(member);
            let answer = member.ask(asked, &data, LOOK);
            let report = answer.and_then(|bytes| read(&bytes));
            member.report = report.map_err(|error| member.failed(&error))?;
        }
        Ok(())
    }

    fn open(&self) {
        for member in &self.members {
            // One that has died needs nothing; in any other one the gate opens by itself.
            let _ = member.ask(Request::NcclOpen, &[], LOOK);
        }
    }

    /// Takes the communicators down. After an error the calls go on, and [`Group::up`] has been tried for those that were
    /// down already.
    ///
    /// # Errors
    /// A text for a user: what each rank waited for, or what failed.
    pub fn down(&mut self, quiesce: Duration) -> Result<NcclDone, String> {
        self.members.retain(|m| m.report.live().next().is_some());
        let mut done = NcclDone::default();
        if let Err(error) = done.time(NcclStep::Level, || self.cut(quiesce)) {
            self.open();
            return Err(error);
        }
        done.communicators = self.ranks().len();
        let limit_ms = millis(DOWN);
        let all = |request| self.all_at_once(|member| member.ask(request, &[], DOWN + MARGIN));
        // Nothing is destroyed before all are idle.
        let taken = done
            .time(NcclStep::Idle, || all(Request::NcclIdle { limit_ms }))
            .and_then(|()| done.time(NcclStep::Down, || all(Request::NcclDown { limit_ms })));
        if let Err(error) = taken {
            if let Err(other) = self.up(UP) {
                tracing::error!("NCCL's communicators are lost: {other}");
            }
            return Err(error);
        }
        Ok(done)
    }

    /// Makes the communicators of running processes again that are down, and lets calls go on that are held, wherever an
    /// agent that has died left off.
    ///
    /// # Errors
    /// As for [`Group::of`], or a text for a user: what failed.
    pub fn bring_up(pids: &[i32]) -> Result<NcclDone, String> {
        let mut group = Self::of(pids)?;
        if !group.is_down() {
            group.open();
            return Ok(NcclDone::default());
        }
        group.members.retain(|m| m.report.live().next().is_some());
        if let Err(error) = group.take_rest_down() {
            tracing::error!("NCCL's communicators: {error}");
        }
        group.up(UP)
    }

    /// Destroys what is left of communicators of which other ranks are down already. A process destroys all that it has, so
    /// that those of its peers go, too.
    fn take_rest_down(&self) -> Result<(), String> {
        let of = |member: &Member, state: State| -> BTreeSet<u64> {
            let comms = member.report.comms.iter();
            let comms = comms.filter(|comm| comm.state == state);
            comms.map(|comm| comm.id).collect()
        };
        let mut down: BTreeSet<u64> = (self.members.iter())
            .flat_map(|member| of(member, State::Down))
            .collect();
        let goes = |member: &Member, down: &BTreeSet<u64>| !of(member, State::Up).is_disjoint(down);
        loop {
            let known = down.len();
            for member in self.members.iter() {
                if goes(member, &down) {
                    down.extend(of(member, State::Up));
                }
            }
            if down.len() == known {
                break;
            }
        }
        let limit_ms = millis(DOWN);
        self.all_at_once(|member| match goes(member, &down) {
            false => Ok(Vec::new()),
            true => member.ask(Request::NcclDown { limit_ms }, &[], DOWN + MARGIN),
        })
    }

    /// Asks all processes at the same time; the first error.
    fn all_at_once<T: Send>(
        &self,
        ask: impl Fn(&Member) -> io::Result<T> + Sync,
    ) -> Result<(), String> {
        std::thread::scope(|scope| {
            let ask = &ask;
            let threads: Vec<_> = (self.members.iter())
                .map(|member| scope.spawn(move || ask(member).err().map(|e| member.failed(&e))))
                .collect();
            let errors = threads.into_iter().map(|one| one.join().unwrap_or(None));
            errors.fold(None, Option::or).map_or(Ok(()), Err)
        })
    }

    /// Holds the calls at a moment at which all ranks are level.
    fn cut(&mut self, quiesce: Duration) -> Result<(), String> {
        let until = Instant::now() + quiesce;
        let hold_ms = millis(quiesce + DOWN + MARGIN);
        let mut goals: BTreeMap<Link, u64> = BTreeMap::new();
        let mut changed = Instant::now();
        loop {
            // All get the same goals. Who reports to be level with them stays so: it is held.
            let mut level = true;
            let before: Vec<Report> = self.members.iter().map(|m| m.report.clone()).collect();
            let mut sent = Vec::new();
            self.each(|member| {
                let targets = targets_of(&goals, &member.report.comms);
                let data = encode_clocks(&targets);
                sent.push(targets);
                (Request::NcclHold { hold_ms }, data)
            })?;
            for (member, targets) in self.members.iter().zip(&sent) {
                level &= is_level(&member.report, targets);
                for clock in &member.report.clocks {
                    let goal = goals.entry(link(clock)).or_default();
                    level &= clock.count <= *goal;
                    *goal = clock.count.max(*goal);
                }
            }
            if level && self.is_complete() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= until {
                return Err(self.out_of_step(&goals, quiesce));
            }
            if self.members.iter().zip(before).any(|(m, b)| m.report != b) {
                changed = now;
            }
            if now - changed >= STALLED {
                self.open();
                std::thread::sleep(LET_PASS);
                changed = Instant::now();
            } else {
                std::thread::sleep(TICK);
            }
        }
    }

    /// What each rank waited for.
    fn out_of_step(&self, goals: &BTreeMap<Link, u64>, quiesce: Duration) -> String {
        let mut parts = Vec::new();
        for member in &self.members {
            let targets = targets_of(goals, &member.report.comms);
            let made = |target: &Clock| {
                let mut own = member.report.clocks.iter();
                let own = own
                    .find(|c| (c.comm, c.rank, c.kind) == (target.comm, target.rank, target.kind));
                own.map_or(0, |clock| clock.count)
            };
            let behind = targets.iter().find(|target| made(target) < target.count);
            let what = match (behind, member.report.inside, &member.report.waiting[..]) {
                (Some(target), ..) => {
                    let kind = match target.kind {
                        Kind::Collective => "collective calls".to_owned(),
                        Kind::SendTo(peer) => format!("sends to rank {peer}"),
                        Kind::ReceiveFrom(peer) => format!("receives from rank {peer}"),
                    };
                    format!(
                        "has made {} of {} {kind} of communicator {:x}",
                        made(target),
                        target.count,
                        target.comm
                    )
                }
                (None, 1.., _) => "is within a call of NCCL's".to_owned(),
                (None, 0, [name, ..]) => format!("waits in {name}"),
                (None, 0, []) => "has made all of its calls".to_owned(),
            };
            parts.push(format!("{} {what}", member.named()));
        }
        format!(
            "NCCL's ranks did not come level within {} s (nccl.quiesce_s): {}",
            quiesce.as_secs(),
            parts.join("; ")
        )
    }

    /// Makes all communicators that are down again, and lets the calls go on.
    ///
    /// # Errors
    /// A text for a user. Communicators that could not be made have NCCL's error from now on.
    pub fn up(&mut self, limit: Duration) -> Result<NcclDone, String> {
        let mut done = NcclDone::default();
        done.communicators = done.time(NcclStep::Up, || self.make(limit))?;
        Ok(done)
    }

    /// Returns how many communicators were down.
    fn make(&mut self, limit: Duration) -> Result<usize, String> {
        let mut first = Ok(());
        let mut fresh: BTreeMap<u64, [u8; UNIQUE_ID]> = BTreeMap::new();
        for (comm, ranks) in self.down_ranks() {
            match self.unique_id(comm, &ranks) {
                Ok(id) => drop(fresh.insert(comm, id)),
                Err(error) => first = first.and(Err(error)),
            }
        }
        let request = Request::NcclUp {
            limit_ms: millis(limit),
        };
        let made = self.all_at_once(|member| {
            let down = |comm: &&Comm| comm.state == State::Down;
            let own: BTreeSet<u64> = member
                .report
                .comms
                .iter()
                .filter(down)
                .map(|c| c.id)
                .collect();
            // All ranks in the same order.
            let own: Vec<Fresh> = own
                .into_iter()
                .filter_map(|comm| Some((comm, *fresh.get(&comm)?)))
                .collect();
            member.ask(request, &encode_fresh(&own), limit + MARGIN)
        });
        first.and(made).map(|()| fresh.len())
    }

    /// The communicators that are down, with the ranks that there are of each.
    fn down_ranks(&mut self) -> BTreeMap<u64, (BTreeSet<u32>, u32)> {
        for member in &mut self.members {
            let answer = member.ask(Request::NcclLook, &[], LOOK);
            // One that does not answer lacks in its communicators.
            member.report = answer.and_then(|bytes| read(&bytes)).unwrap_or_default();
        }
        let mut ranks: BTreeMap<u64, (BTreeSet<u32>, u32)> = BTreeMap::new();
        let comms = self.members.iter().flat_map(|member| &member.report.comms);
        for comm in comms.filter(|comm| comm.state == State::Down) {
            let (known, count) = ranks.entry(comm.id).or_default();
            known.insert(comm.rank);
            *count = comm.ranks.max(*count);
        }
        ranks
    }

    /// Has the process with the first rank of a communicator make a unique id for it.
    fn unique_id(
        &self,
        comm: u64,
        (ranks, count): &(BTreeSet<u32>, u32),
    ) -> Result<[u8; UNIQUE_ID], String> {
        if ranks.len() < *count as usize {
            return Err(format!(
                "communicator {comm:x} cannot be made again: {} of its {count} ranks are left",
                ranks.len()
            ));
        }
        let first = |member: &&Member| {
            let mut own = member.report.comms.iter();
            own.any(|own| {
                own.id == comm && own.state == State::Down && ranks.first() == Some(&own.rank)
            })
        };
        let member = self.members.iter().find(first);
        let member = member.ok_or_else(|| "its first rank has ended".to_owned())?;
        let id = member.ask(Request::NcclUniqueId, &[], LOOK);
        let id = id.map_err(|error| member.failed(&error))?;
        id.try_into()
            .map_err(|_| member.failed(&io::Error::other("its unique id makes no sense")))
    }

    /// Whether any communicator is down.
    pub fn is_down(&self) -> bool {
        let comms = self.members.iter().flat_map(|member| &member.report.comms);
        comms.into_iter().any(|comm| comm.state == State::Down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMM: u64 = 5;

    #[test]
    fn multicast_without_a_communicator_is_found() {
        let mut group = Group {
            members: Vec::new(),
        };
        for (pid, obstacle) in [
            (1, "a graph".to_owned()),
            (2, Reason::Multicast.to_string()),
        ] {
            assert_eq!(group.multicast(), None);
            let (_, socket) = cryopod_preload_wire::pair().unwrap();
            let library = Library::at(socket);
            let obstacles = vec![obstacle];
            let report = Report {
                obstacles,
                ..Report::default()
            };
            group.members.push(Member {
                pid,
                library,
                report,
            });
        }
        assert!(!group.has_comms() && group.obstacles().is_empty());
        assert_eq!(group.multicast().unwrap().0, 2);
    }

    fn clock(rank: u32, kind: Kind, count: u64) -> Clock {
        Clock {
            comm: COMM,
            rank,
            kind,
            count,
        }
    }

    #[test]
    fn both_ends_of_a_pair_have_one_goal() {
        let sent = clock(0, Kind::SendTo(1), 3);
        let received = clock(1, Kind::ReceiveFrom(0), 2);
        assert_eq!(link(&sent), link(&received));
        assert_ne!(link(&sent), link(&clock(1, Kind::SendTo(0), 3)));
        let goals = BTreeMap::from([(link(&sent), 3), ((COMM, None), 7)]);
        let own = |rank| {
            [Comm {
                id: COMM,
                ranks: 2,
                rank,
                state: State::Up,
            }]
        };
        assert_eq!(
            targets_of(&goals, &own(1)),
            [
                clock(1, Kind::Collective, 7),
                clock(1, Kind::ReceiveFrom(0), 3)
            ]
        );
        let report = |clocks: &[Clock]| Report {
            clocks: clocks.to_vec(),
            ..Report::default()
        };
        let targets = targets_of(&goals, &own(0));
        assert!(is_level(
            &report(&[clock(0, Kind::Collective, 7), sent]),
            &targets
        ));
        assert!(!is_level(
            &report(&[clock(0, Kind::Collective, 7)]),
            &targets
        ));
        assert!(!is_level(
            &report(&[clock(0, Kind::Collective, 8), sent]),
            &targets
        ));
    }
}
