//! The transport between threads of one process: a board where ranks pin what they send.
//!
//! # Protocol
//!
//! A world is one mutex. Behind it, each member set has a *board*, and each exchange on a board is a *round*, found by
//! `(sequence, step)`:
//!
//! 1. A rank enters: if the world has failed it leaves with that failure. It compares its call with every call already in
//!    the round; a difference fails the world. It pins its call and its parcels.
//! 2. The last one to enter completes the round and rings its bell. A complete round is never taken back: who is in it gets
//!    its values even if the world fails meanwhile.
//! 3. Each rank takes its column; the last one to do so removes the round.
//!
//! A failure (recorded once) drops all incomplete rounds and rings all bells, so nobody waits for ever. Values are never
//! copied under the lock: a parcel is a handle.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Result;

use super::call::{Announcement, Call, disagreement};
use super::error::{Cause, GroupError, Place, Site};
use super::parcel::Parcel;
use super::traffic::Counters;
use super::transport::Transport;

/// What the rank threads of one launch share.
pub(super) struct World {
    timeout: Duration,
    state: Mutex<State>,
    alarm: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    failure: Option<GroupError>,
    departed: Vec<bool>,
    /// The last collective that each rank entered.
    last: Vec<Option<Place>>,
    /// Boards by channel and members.
    names: HashMap<(u32, Arc<[usize]>), usize>,
    boards: Vec<Board>,
}

struct Board {
    members: Arc<[usize]>,
    next: Vec<u64>,
    rounds: HashMap<(u64, u8), Round>,
}

struct Round {
    place: Place,
    pinned: Vec<Option<(Call, Vec<Option<Parcel>>)>>,
    bell: Arc<Condvar>,
    complete: bool,
    taken: usize,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

impl World {
    /// A world of `ranks` threads; `alarm` is called when it fails.
    pub fn new(ranks: usize, timeout: Duration, alarm: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        let state = State { departed: vec![false; ranks], last: vec![None; ranks], ..State::default() };
        Arc::new(Self { timeout, state: Mutex::new(state), alarm: Box::new(alarm) })
    }

    /// One rank's end of the group of all.
    pub fn endpoint(self: &Arc<Self>, rank: usize) -> Endpoint {
        let all: Vec<usize> = (0..self.lock().departed.len()).collect();
        self.join(rank, 0, &all, Arc::default())
    }

    /// The failure that ended it.
    pub fn failure(&self) -> Option<GroupError> {
        self.lock().failure.clone()
    }

    /// Records a rank's failure in its own code.
    pub fn fail(&self, rank: usize, cause: Cause) {
        let mut state = self.lock();
        let operation = Site::Outside { after: state.last[rank].clone() };
        self.record(&mut state, GroupError { rank, operation, cause });
    }

    /// Records that a rank has returned: whoever waits for it, now or later, waits in vain.
    pub fn depart(&self, rank: usize) {
        let mut state = self.lock();
        state.departed[rank] = true;
        let missed = state
            .incomplete()
            .find(|(board, round)| board.members.binary_search(&rank).is_ok_and(|index| round.pinned[index].is_none()));
        if let Some(operation) = missed.map(|(_, round)| Site::Collective(round.place.clone())) {
            self.record(&mut state, GroupError { rank, operation, cause: Cause::Departed });
        }
    }

    fn join(self: &Arc<Self>, rank: usize, channel: u32, members: &[usize], counters: Arc<Counters>) -> Endpoint {
        let mut state = self.lock();
        let (board, members) = state.board(channel, members);
        let index = members.binary_search(&rank).expect("a rank joins its own groups");
        Endpoint { world: self.clone(), channel, board, index, members, counters }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock leaves it half done, so a panic there (a tensor's destructor) spoils nothing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, state: &mut State, failure: GroupError) -> GroupError {
        if let Some(first) = &state.failure {
            return first.clone();
        }
        log::debug!("{failure}");
        state.failure = Some(failure.clone());
        for board in &mut state.boards {
            board.rounds.retain(|_, round| {
                round.bell.notify_all();
                round.complete
            });
        }
        (self.alarm)();
        failure
    }
}

impl State {
    fn board(&mut self, channel: u32, members: &[usize]) -> (usize, Arc<[usize]>) {
        let members: Arc<[usize]> = members.into();
        if let Some(((_, members), &board)) = self.names.get_key_value(&(channel, members.clone())) {
            return (board, members.clone());
        }
        self.names.insert((channel, members.clone()), self.boards.len());
        self.boards.push(Board { next: vec![0; members.len()], rounds: HashMap::new(), members: members.clone() });
        (self.boards.len() - 1, members)
    }

    fn incomplete(&self) -> impl Iterator<Item = (&Board, &Round)> {
        let rounds = self.boards.iter().flat_map(|b| b.rounds.values().map(move |r| (b, r)));
        rounds.filter(|(_, round)| !round.complete)
    }

    /// The ranks that a round waits for in the end: a missing one that itself waits elsewhere passes the blame on.
    fn culprits(&self, board: &Board, round: &Round) -> Vec<usize> {
        let direct = missing(board, round);
        let (mut seen, mut open, mut found) = (direct.clone(), direct.clone(), Vec::new());
        while let Some(rank) = open.pop() {
            let mut waits = false;
            for (board, round) in self.incomplete() {
                let Ok(index) = board.members.binary_search(&rank) else { continue };
                if round.pinned[index].is_some() {
                    waits = true;
                    for next in missing(board, round) {
                        if !seen.contains(&next) {
                            seen.push(next);
                            open.push(next);
                        }
                    }
                }
            }
            if !waits {
                found.push(rank);
            }
        }
        found.sort_unstable();
        // Ranks that wait for each other in a circle: all of them are to blame.
        if found.is_empty() { direct } else { found }
    }
}

fn missing(board: &Board, round: &Round) -> Vec<usize> {
    let members = board.members.iter().zip(&round.pinned);
    members.filter(|(_, pinned)| pinned.is_none()).map(|(&rank, _)| rank).collect()
}

/// One rank's end of a group of threads.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    world: Arc<World>,
    channel: u32,
    board: usize,
    index: usize,
    members: Arc<[usize]>,
    counters: Arc<Counters>,
}

impl Endpoint {
    /// Pins a call to its round, and finds out whether it fits.
    fn enter(&self, state: &mut State, call: &Call, parcels: Vec<Option<Parcel>>) -> Result<Arc<Condvar>, GroupError> {
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let place = Place { operation: call.operation, sequence: call.sequence, members: self.members.clone() };
        state.last[self.members[self.index]] = Some(place.clone());
        let board = &mut state.boards[self.board];
        let round = board.rounds.entry((call.sequence, call.step)).or_insert_with(|| Round {
            place: place.clone(),
            pinned: self.members.iter().map(|_| None).collect(),
            bell: Arc::default(),
            complete: false,
            taken: 0,
        });
        if let Some((rank, cause)) = self.dispute(round, call, &parcels) {
            let failure = GroupError { rank, operation: Site::Collective(place), cause };
            return Err(self.world.record(state, failure));
        }
        round.pinned[self.index] = Some((call.clone(), parcels));
        let bell = round.bell.clone();
        if round.pinned.iter().all(Option::is_some) {
            round.complete = true;
            bell.notify_all();
            return Ok(bell);
        }
        let missing = self.members.iter().zip(&round.pinned).filter(|(_, pinned)| pinned.is_none());
        let gone = missing.map(|(&rank, _)| rank).find(|&rank| state.departed[rank]);
        if let Some(rank) = gone {
            let failure = GroupError { rank, operation: Site::Collective(place), cause: Cause::Departed };
            return Err(self.world.record(state, failure));
        }
        Ok(bell)
    }

    /// Whether this call contradicts one that is pinned.
    fn dispute(&self, round: &Round, call: &Call, parcels: &[Option<Parcel>]) -> Option<(usize, Cause)> {
        let me = Announcement { index: self.index, rank: self.members[self.index], call, parcels };
        round.pinned.iter().enumerate().find_map(|(index, pinned)| {
            let (call, parcels) = pinned.as_ref()?;
            let other = Announcement { index, rank: self.members[index], call, parcels };
            let (on, ours, theirs) = disagreement(&other, &me)?;
            Some((theirs.rank, Cause::Disagreed { on, ours, theirs }))
        })
    }

    /// Takes what was sent to this rank, once all have come.
    fn take(&self, state: &mut State, key: (u64, u8)) -> Option<Vec<Option<Parcel>>> {
        let rounds = &mut state.boards[self.board].rounds;
        let round = rounds.get_mut(&key).filter(|round| round.complete)?;
        let column = round.pinned.iter_mut().map(|pinned| {
            let (_, parcels) = pinned.as_mut()?;
            parcels.get_mut(self.index)?.take()
        });
        let column = column.collect();
        round.taken += 1;
        if round.taken == self.members.len() {
            rounds.remove(&key);
        }
        Some(column)
    }

    fn give_up(&self, state: &mut State, key: (u64, u8)) -> GroupError {
        let board = &state.boards[self.board];
        let Some(round) = board.rounds.get(&key) else {
            // Only a failure removes a round that someone waits for.
            return state.failure.clone().expect("a removed round has a reason");
        };
        let missing = state.culprits(board, round);
        let failure = GroupError {
            rank: missing[0],
            operation: Site::Collective(round.place.clone()),
            cause: Cause::TimedOut { after: self.world.timeout, missing },
        };
        self.world.record(state, failure)
    }
}

impl Transport for Endpoint {
    fn rank(&self) -> usize {
        self.index
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Transport>> {
        let rank = self.members[self.index];
        Ok(Arc::new(self.world.join(rank, self.channel, members, self.counters.clone())))
    }

    fn channel(&self, channel: u32) -> Result<Arc<dyn Transport>> {
        let rank = self.members[self.index];
        Ok(Arc::new(self.world.join(rank, channel, &self.members, self.counters.clone())))
    }

    fn begin(&self) -> u64 {
        let next = &mut self.world.lock().boards[self.board].next[self.index];
        *next += 1;
        *next - 1
    }

    fn exchange(&self, call: &Call, parcels: Vec<Option<Parcel>>) -> Result<Vec<Option<Parcel>>> {
        let key = (call.sequence, call.step);
        // A timeout too long for the clock is none.
        let deadline = Instant::now().checked_add(self.world.timeout);
        let mut state = self.world.lock();
        let bell = self.enter(&mut state, call, parcels)?;
        loop {
            if let Some(parcels) = self.take(&mut state, key) {
                return Ok(parcels);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone().into());
            }
            state = match deadline.map(|d| d.saturating_duration_since(Instant::now())) {
                None => bell.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Err(self.give_up(&mut state, key).into()),
                Some(left) => bell.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    fn fail(&self, cause: Cause) {
        self.world.fail(self.members[self.index], cause);
    }

    fn failure(&self) -> Option<GroupError> {
        self.world.failure()
    }

    fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    fn prepare(&self, parcel: Parcel) -> Result<Parcel> {
        // A Flex tensor is readable from every thread. Another device's is read once here, whoever gets it.
        if parcel.in_host_memory() { Ok(parcel) } else { parcel.into_host() }
    }
}
