// The number of a block among those of its part, in the place of ``blockIdx``.
#ifndef RM_PART
#define RM_PART
struct RmPart { int x; };
#endif
