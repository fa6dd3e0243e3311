// A team is the threads of a parallel region. They share out loops, and wait for one another after each.
//
// OpenMP's own barriers spin for long, since it cannot know how soon a thread comes; where other processes have
// the cores, its thread comes late, and all spin for nothing. These spin for as long as a stage of a layer may
// last, then give the core away.

#pragma once

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS 1000
#define MOST_SHARES 4                          // of a thread in a loop
#define MOST_TURNS 12                          // of a share

typedef struct {
    int threads;
    atomic_int arrived, round;
    atomic_llong next;                         // of the loop that is under way
} Team;

// The first thing that every thread of a region does.
static inline void team_begin(Team *team) {
#pragma omp single
    {
        team->threads = omp_get_num_threads();
        atomic_init(&team->arrived, 0);
        atomic_init(&team->round, 0);
        atomic_init(&team->next, 0);
    }
}

// Returns the first of `count` turns of a loop that are this thread's now. A loop ends with team_wait.
static inline int64_t team_take(Team *team, int64_t count) { return atomic_fetch_add(&team->next, count); }

// How many turns of a loop to take at a time: asking takes half a microsecond while others ask.
static inline int64_t team_share(const Team *team, int64_t turns) {
    int64_t share = turns / (MOST_SHARES * team->threads);
    return share < 1 ? 1 : share < MOST_TURNS ? share : MOST_TURNS;
}

// A loop over `turns` turns, of which each thread takes some at a time. It ends with team_wait.
#define TEAM_FOR(team, turn, turns)                                                                       \
    for (int64_t share_ = team_share(team, turns), first_; (first_ = team_take(team, share_)) < (turns);) \
        for (int64_t turn = first_; turn < first_ + share_ && turn < (turns); turn++)

static inline void team_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Wait for all threads; what they wrote can be read then.
static inline void team_wait(Team *team) {
    int round = atomic_load(&team->round);
    if (atomic_fetch_add(&team->arrived, 1) + 1 == team->threads) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->next, 0);
        atomic_store(&team->round, round + 1);
        return;
    }
    for (int spins = 0; atomic_load(&team->round) == round; spins++) {
        if (spins < SPINS) team_relax();
        else sched_yield();
    }
}
