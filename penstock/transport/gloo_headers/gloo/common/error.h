// Replaces gloo's header of this name, of which nothing is needed; see gloo/context.h.
#pragma once
